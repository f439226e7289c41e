//! Packages of a report by layer.

use super::bundle_facts::ShardRow;

/// Errors by layer and kind of package.
pub struct LayerErrors {
    /// Names of the layers.
    pub rows: Vec<String>,
    /// Kinds of packages.
    pub kinds: Vec<&'static str>,
    /// Largest error of a layer's packages of a kind; none without such a package.
    pub values: Vec<Vec<Option<f64>>>, // [rows, kinds]
}

/// Names the packages that begin in a layer. A single package of several layers is named by all of them.
pub fn layer_name(shards: &[ShardRow], layer: Option<usize>) -> String {
    let Some(first) = layer else { return "head".into() };
    let own: Vec<&ShardRow> = shards.iter().filter(|s| s.layer == layer).collect();
    match own.as_slice() {
        [ShardRow { last_layer: Some(last), .. }] => format!("layers {first} to {last}"),
        _ => format!("layer {first}"),
    }
}

/// Groups packages by the layer in which they begin, in the order of the chain.
pub fn by_layer(shards: &[ShardRow]) -> Vec<(String, Vec<&ShardRow>)> {
    let mut groups: Vec<(Option<usize>, Vec<&ShardRow>)> = Vec::new();
    for shard in shards {
        match groups.iter_mut().find(|(layer, _)| *layer == shard.layer) {
            Some((_, own)) => own.push(shard),
            None => groups.push((shard.layer, vec![shard])),
        }
    }
    groups.into_iter().map(|(layer, own)| (layer_name(shards, layer), own)).collect()
}

/// Finds the largest error of each layer and kind.
pub fn layer_errors(shards: &[ShardRow]) -> LayerErrors {
    let mut kinds: Vec<&'static str> = Vec::new();
    for shard in shards {
        if !kinds.contains(&shard.kind) {
            kinds.push(shard.kind);
        }
    }
    let (mut rows, mut values) = (Vec::new(), Vec::new());
    for (name, own) in by_layer(shards) {
        let worst =
            |kind: &&str| own.iter().filter(|s| s.kind == *kind).map(|s| s.output_error).reduce(f64::max);
        values.push(kinds.iter().map(worst).collect());
        rows.push(name);
    }
    LayerErrors { rows, kinds, values }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anemoe_gates::residency::rule::Verdict;

    fn shard(layer: Option<usize>, kind: &'static str, output_error: f64) -> ShardRow {
        ShardRow {
            name: String::new(),
            kind,
            layer,
            last_layer: None,
            bytes: 1,
            quant: Default::default(),
            verdict: Verdict::Ane,
            too_small: false,
            rule: String::new(),
            min_weight_cosine: 1.0,
            output_error,
        }
    }

    #[test]
    fn errors_are_the_largest_of_a_layer_and_kind() {
        let shards = [
            shard(Some(0), "attention", 0.1),
            shard(Some(0), "experts", 0.2),
            shard(Some(0), "experts", 0.3),
            shard(Some(1), "experts", 0.4),
            shard(None, "head", 0.5),
        ];
        let errors = layer_errors(&shards);
        assert_eq!(errors.rows, ["layer 0", "layer 1", "head"]);
        assert_eq!(errors.kinds, ["attention", "experts", "head"]);
        let expected = [[Some(0.1), Some(0.3), None], [None, Some(0.4), None], [None, None, Some(0.5)]];
        assert_eq!(errors.values, expected.map(Vec::from));
        assert_eq!(by_layer(&shards)[0].1.len(), 3);
    }
}
