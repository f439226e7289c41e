use super::Jinja;
use serde_json::{Map, Value, json};
use std::time::{Duration, Instant};

fn render(template: &str, variables: &Value) -> Result<String, String> {
    Jinja::parse(template)?.run(variables.as_object().unwrap_or(&Map::new()), None)
}

/// Texts of Python's Jinja, which `xtask/oracle/jinja.py --goldens` writes.
#[test]
fn expressions_give_the_texts_of_python() {
    let goldens: Value = serde_json::from_str(include_str!("goldens.json")).unwrap();
    let rows = goldens["rows"].as_array().unwrap();
    assert!(rows.len() > 80);
    for row in rows {
        let template = row[0].as_str().unwrap();
        assert_eq!(
            render(template, &goldens["variables"]).as_deref(),
            Ok(row[1].as_str().unwrap()),
            "{template}"
        );
    }
}

#[test]
fn errors_say_what_is_wrong_and_where() {
    for (template, says) in [
        ("\n{{ 1 + }}", "an expression expected, found `}}` (line 2)"),
        ("{% for x in [1] %}", "`endfor` or `else` expected"),
        ("{% nothing %}", "unknown tag `nothing`"),
        ("{{ 'a }}", "a text without a closing quote"),
        ("{{ (1] }}", "unexpected `]`"),
        ("a\n{{ x.y }}", "'x' is undefined (line 2)"),
        ("{{ [1].append(2) }}", "'append' of 'list' object is unsafe"),
        ("{{ 1 + 'a' }}", "unsupported operand type(s) for +: 'int' and 'str'"),
        ("{{ 1 < 'a' }}", "'<' not supported between instances of 'int' and 'str'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' | nothing }}", "No filter named 'nothing'."),
        ("{{ 'a' is nothing }}", "No test named 'nothing'."),
        ("{{ {}['a'].b }}", "'dict object' has no attribute 'a'"),
        ("{{ '%d' % 'a' }}", "a number is required, not str"),
        ("{{ raise_exception('only users') }}", "only users (line 1)"),
        ("{{ {1: missing} | tojson }}", "Undefined is not JSON serializable"),
        ("{% include 'x' %}", "`include`: there are no other templates"),
    ] {
        let said = render(template, &json!({})).unwrap_err();
        assert!(said.contains(says), "{template}: {said}");
    }
}

/// Templates that would take all memory, all time, or the whole stack.
#[test]
fn templates_end_within_their_bounds() {
    let chain = |step: &str| {
        format!("{{% set ns = namespace(x=[]) %}}{{% for i in range(100000) %}}{step}{{% endfor %}}")
    };
    let begun = Instant::now();
    for (template, says) in [
        ("{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}".to_string(), "steps"),
        (chain("{% set ns.s = (ns.s or 'ab') ~ (ns.s or 'ab') %}"), "memory"),
        (chain("{% set ns.x = [ns.x] %}"), "nested"),
        (chain("{% set ns.x = [ns.x] | map('list') %}"), "nested"),
        (chain("{% set ns.x = cycler(ns.x, ns.x) %}"), "nested"),
        (chain("{% for y in [ns.x] %}{% set ns.x = loop %}{% endfor %}"), "nested"),
        ("{% set ns = namespace(x=1) %}{% for i in range(99) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {ns.x: 1} }}".into(), "steps"),
        ("{% set ns = namespace(x=1) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}".into(), ""),
        ("{{ 'a' * 10 ** 12 }}".into(), "memory"),
        ("{{ [1] * 10 ** 12 }}".into(), "memory"),
        ("{{ 'a'.ljust(10 ** 12) }}".into(), "memory"),
        ("{{ ('a' * 10000000) | replace('a', 'b' * 10000) }}".into(), "memory"),
        ("{{ ('b' * 100000).join(['a'] * 100000) }}".into(), "memory"),
        ("{{ '%99999999d' % 1 }}".into(), "wide"),
        ("{{ [1] | batch(10 ** 12, 'x') | list }}".into(), "memory"),
        ("{{ range(10 ** 9) }}".into(), "Range too big"),
        ("{{ 10 ** 10 ** 9 }}".into(), "too large"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".into(), "nested"),
        (["{{ ", &"(".repeat(9999), "1", &")".repeat(9999), " }}"].concat(), "nested"),
        (["{{ 1", &"+1".repeat(100_000), " }}"].concat(), "operators"),
        ("{% if 1 %}".repeat(100_000), "nested"),
    ] {
        let said = render(&template, &json!({})).unwrap_err();
        assert!(said.contains(says), "{}: {said}", &template[..template.len().min(200)]);
    }
    // Long lists of short expressions are no deep ones.
    let long = ["{{ [", &"(1 + 2).real | string,".repeat(5000), "] | length }}"].concat();
    assert_eq!(render(&long, &json!({})).as_deref(), Ok("5000"));
    // Macros and namespaces that hold each other end as well.
    let macros =
        chain("{% set before = ns.m %}{% macro m() %}{% endmacro %}{% set ns.m = m %}{% set ns.ns = ns %}");
    assert_eq!(render(&macros, &json!({})).as_deref(), Ok(""));
    assert!(begun.elapsed() < Duration::from_secs(60));
}

#[test]
fn a_deadline_ends_a_template() {
    let endless = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}";
    let said = Jinja::parse(endless).unwrap().run(&Map::new(), Some(Instant::now())).unwrap_err();
    assert!(said.contains("longer than the time"), "{said}");
}
