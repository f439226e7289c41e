//! Files of forms, which `tune` writes and `build --forms` reads: a table for each sort of shard, with choices of its form.

use crate::form::ShardForm;
use crate::{Error, Result};
use anemoe_bundle::ShardKind;
use std::collections::BTreeMap;
use std::path::Path;
use toml::Value;

/// Returns the choices that change shards of a sort, as keys of its table: options of the command line without
/// dashes.
pub const fn keys(sort: ShardKind) -> &'static [&'static str] {
    match sort {
        ShardKind::Attention => {
            &["cache", "history", "attention", "io", "norm", "functions", "context-buckets"]
        }
        ShardKind::Experts => &["activation", "io", "experts", "functions"],
        ShardKind::ExpertsCombine | ShardKind::Moe => &["activation", "io", "norm", "experts", "functions"],
        ShardKind::Layers => &[
            "cache",
            "history",
            "attention",
            "activation",
            "io",
            "norm",
            "experts",
            "functions",
            "context-buckets",
            "layers-per-shard",
        ],
        ShardKind::Head => &["io", "norm", "functions"],
    }
}

/// Tells whether some sort of shards has this key.
fn is_known(key: &str) -> bool {
    ShardKind::ALL.iter().any(|sort| keys(*sort).contains(&key))
}

/// Reads the text of a file of forms: the form of each sort of shards that has a table.
///
/// # Errors
/// [`Kind::Invalid`](anemoe_io::Kind::Invalid) naming the file, the table and the key, with what is known there.
pub fn parse(path: &Path, text: &str) -> Result<BTreeMap<ShardKind, ShardForm>> {
    let tables: toml::Table = toml::from_str(text).map_err(|e| {
        let line = e.span().map(|s| text[..s.start.min(text.len())].matches('\n').count() + 1);
        let place = line.map(|n| format!("line {n}: ")).unwrap_or_default();
        Error::invalid(path, format!("TOML: {place}{}", e.message().trim()))
    })?;
    let sorts = || ShardKind::ALL.map(ShardKind::name).join(", ");
    if tables.is_empty() {
        return Err(Error::invalid(
            path,
            format!("forms: no sort of shards is named; there are the tables: {}", sorts()),
        ));
    }
    let mut forms = BTreeMap::new();
    for (name, table) in &tables {
        let sort = ShardKind::ALL.into_iter().find(|sort| sort.name() == name);
        let sort = sort.ok_or_else(|| {
            Error::invalid(
                path,
                format!("forms: `{name}` is no sort of shards; there are the tables: {}", sorts()),
            )
        })?;
        let wrong = |what: String| Error::invalid(path, format!("forms: [{name}]: {what}"));
        let Value::Table(table) = table else {
            return Err(wrong(format!("expected a table with some of: {}", keys(sort).join(", "))));
        };
        let mut form = ShardForm::default();
        for (key, value) in table {
            let known = || format!("known here are: {}", keys(sort).join(", "));
            if !is_known(key) {
                return Err(wrong(format!("there is no choice `{key}`; {}", known())));
            }
            if !keys(sort).contains(&key.as_str()) {
                return Err(wrong(format!("`{key}` changes nothing of this sort of shards; {}", known())));
            }
            let word = word(value).ok_or_else(|| {
                wrong(format!(
                    "{key}: {} is neither a word nor a number, nor a list of numbers",
                    described(value)
                ))
            })?;
            form.set(&format!("--{key}"), &word).map_err(|what| wrong(format!("{key}: {what}")))?;
        }
        forms.insert(sort, form);
    }
    Ok(forms)
}

/// Writes a TOML value as on the command line: a word, a number, or numbers joined by commas; none for other types.
fn word(value: &Value) -> Option<String> {
    match value {
        Value::String(word) => Some(word.clone()),
        Value::Integer(n) => Some(n.to_string()),
        Value::Array(list) => {
            let numbers: Option<Vec<String>> =
                list.iter().map(|n| Some(n.as_integer()?.to_string())).collect();
            numbers.map(|n| n.join(","))
        }
        _ => None,
    }
}

/// Names the type of a value, for messages.
fn described(value: &Value) -> String {
    let name = value.type_str();
    format!("{} {name}", if name.starts_with('a') { "an" } else { "a" })
}

/// Writes the choices of a form that change shards of a sort, a line each.
pub fn lines(sort: ShardKind, form: &ShardForm) -> String {
    let mut text = String::new();
    for (option, word) in form.differences() {
        let key = option.trim_start_matches('-');
        if !keys(sort).contains(&key) {
            continue;
        }
        let numbers = word.split(',').all(|n| n.parse::<u64>().is_ok());
        let value = match (key, numbers) {
            ("context-buckets", _) => format!("[{}]", word.replace(',', ", ")),
            (_, true) => word,
            (_, false) => format!("\"{word}\""),
        };
        text += &format!("{key} = {value}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context_buckets::ContextBuckets;
    use crate::form::{
        ActivationForm, AttentionForm, CacheForm, ExpertForm, FunctionForm, HistoryForm, IoForm, NormForm,
    };
    use crate::models;
    use crate::plan::PlanOptions;
    use crate::shard_program::lower_without_weights;
    use anemoe_bundle::TokenCount;
    use std::num::NonZeroUsize;

    fn read(text: &str) -> Result<BTreeMap<ShardKind, ShardForm>> {
        parse(Path::new("forms.toml"), text)
    }

    #[test]
    fn a_file_is_read_and_what_is_written_is_read_back() {
        let forms = read(
            "[attention]\ncache = 'host'\ncontext-buckets = [32, 64]\n[layers]\nlayers-per-shard = 2\n[head]\nio = 'channels-last'\n",
        )
        .unwrap();
        let attention = forms[&ShardKind::Attention];
        assert_eq!(attention.context_buckets.to_string(), "32,64");
        assert_eq!(
            read("[attention]\ncontext-buckets = '32,64'\n").unwrap()[&ShardKind::Attention].context_buckets,
            attention.context_buckets
        );
        for (sort, form) in &forms {
            let text = format!("[{}]\n{}", sort.name(), lines(*sort, form));
            assert_eq!(read(&text).unwrap()[sort], *form, "{text}");
        }
        // A choice that concerns other sorts alone is not written.
        let apart =
            ShardForm { cache: CacheForm::Host, functions: FunctionForm::Apart, ..ShardForm::default() };
        assert_eq!(lines(ShardKind::Experts, &apart), "functions = \"apart\"\n");
    }

    #[test]
    fn wrong_files_are_named_with_the_table_and_what_is_known() {
        for (text, says) in [
            ("", "no sort of shards is named; there are the tables: attention, experts"),
            ("[attentions]\n", "`attentions` is no sort of shards; there are the tables: attention, experts"),
            ("attention = 3\n", "[attention]: expected a table with some of: cache"),
            (
                "[attention]\ncaches = 'host'\n",
                "[attention]: there is no choice `caches`; known here are: cache, history",
            ),
            (
                "[attention]\nactivation = 'sigmoid'\n",
                "[attention]: `activation` changes nothing of this sort",
            ),
            (
                "[head]\ncache = 'host'\n",
                "[head]: `cache` changes nothing of this sort of shards; known here are: io, norm, functions",
            ),
            ("[attention]\ncache = 'hosts'\n", "[attention]: cache: `hosts` is not one of state, host"),
            ("[attention]\ncontext-buckets = [64, 32]\n", "[attention]: context-buckets: 32 behind 64"),
            ("[attention]\ncontext-buckets = [1.5]\n", "[attention]: context-buckets: an array is neither"),
            ("[layers]\nlayers-per-shard = 0\n", "[layers]: layers-per-shard: `0` is not a number of layers"),
            ("[attention\n", "line 1: "),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.to_string().contains(says), "{text}: {error}");
            assert_eq!(error.path(), Some(Path::new("forms.toml")));
        }
    }

    /// Lowers the shards of a sort, of a plan with this form: name and program of each; none where there is no such
    /// plan.
    fn programs(model: &str, joined: bool, sort: ShardKind, form: ShardForm) -> Option<Vec<String>> {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(model);
        let family = models::open(models::load(fixture.to_str().unwrap()).unwrap()).unwrap();
        let tokens = [1, 4].map(|n| TokenCount { min: n, max: n }).to_vec();
        let layers = NonZeroUsize::new(2).filter(|_| joined);
        let mut options = PlanOptions { tokens, ..PlanOptions::default() };
        options.form.layers_per_shard = layers;
        // Two packs per layer: one of them is experts alone.
        options.ffn_shards = Some(2).filter(|_| !joined);
        options.forms.insert(sort, form);
        let plan = family.plan(&options).ok()?;
        let own = plan.shards.iter().filter(|s| s.kind == sort);
        Some(
            own.map(|s| format!("{} {:?}", s.name, lower_without_weights(&family, s).unwrap().program))
                .collect(),
        )
    }

    /// Checks that a sort knows a key exactly where the key changes a program of some family.
    #[test]
    fn keys_are_those_that_change_a_program() {
        let default = ShardForm::default();
        let host = ShardForm { cache: CacheForm::Host, ..default };
        let hosts = ShardForm { history: HistoryForm::Host, ..host };
        let buckets = ContextBuckets::new(&[32]).unwrap();
        let changes: [(&str, Vec<(ShardForm, ShardForm)>); 9] = [
            ("cache", vec![(default, host), (ShardForm { history: HistoryForm::Host, ..default }, hosts)]),
            ("history", vec![(default, ShardForm { history: HistoryForm::Host, ..default })]),
            ("attention", vec![(default, ShardForm { attention: AttentionForm::PerHead, ..default })]),
            ("activation", vec![(default, ShardForm { activation: ActivationForm::Sigmoid, ..default })]),
            ("io", vec![(default, ShardForm { io: IoForm::ChannelsLast, ..default })]),
            ("norm", vec![(default, ShardForm { norm: NormForm::Plain, ..default })]),
            ("experts", vec![(default, ShardForm { experts: ExpertForm::Bank, ..default })]),
            (
                "functions",
                vec![
                    (default, ShardForm { functions: FunctionForm::Apart, ..default }),
                    (host, ShardForm { functions: FunctionForm::Apart, ..host }),
                    (hosts, ShardForm { functions: FunctionForm::Apart, ..hosts }),
                ],
            ),
            ("context-buckets", vec![(default, ShardForm { context_buckets: buckets, ..default })]),
        ];
        for sort in ShardKind::ALL {
            let joined = sort == ShardKind::Layers;
            for (key, pairs) in &changes {
                let changed = ["tiny-gemma4-moe", "tiny-zaya"].iter().any(|model| {
                    let own = |mut form: ShardForm| {
                        form.layers_per_shard = NonZeroUsize::new(2).filter(|_| joined);
                        programs(model, joined, sort, form)
                    };
                    pairs.iter().any(|(from, to)| own(*from).zip(own(*to)).is_some_and(|(a, b)| a != b))
                });
                assert_eq!(changed, keys(sort).contains(key), "[{}] {key}", sort.name());
            }
        }
    }
}
