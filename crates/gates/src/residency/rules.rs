//! Table of the rules: `rules.toml`, with the conditions of `matchers.rs`.

use super::matchers;
use super::rule::{Matcher, Rule};
use serde::Deserialize;
use std::sync::LazyLock;

#[derive(Deserialize)]
struct RuleTable {
    rule: Vec<Rule>,
}

static RULES: LazyLock<Vec<Rule>> = LazyLock::new(|| {
    let table: RuleTable =
        toml::from_str(include_str!("rules.toml")).unwrap_or_else(|e| panic!("rules.toml: {e}"));
    let mut rules = table.rule;
    for rule in rules.iter_mut().filter(|rule| rule.types.is_empty()) {
        rule.matcher =
            matchers::of(&rule.id).unwrap_or_else(|| panic!("rules.toml: no condition of {}", rule.id));
    }
    rules
});

/// Returns all rules, of all three questions.
pub fn all() -> impl Iterator<Item = &'static Rule> {
    RULES.iter()
}

/// Returns the rule with this id.
pub fn find(id: &str) -> Option<&'static Rule> {
    all().find(|r| r.id == id)
}

/// Returns the op types that leave the ANE, or may leave it.
pub fn doubtful_types() -> impl Iterator<Item = &'static str> {
    let doubtful = all().filter(|r| r.decides() && r.verdict != super::rule::Verdict::Ane);
    doubtful.filter(|r| matches!(r.matcher, Matcher::Types)).flat_map(|r| r.types.iter().map(String::as_str))
}
