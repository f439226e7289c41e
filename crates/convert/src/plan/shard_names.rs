//! Names of packages, functions and values of a plan.

use anemoe_bundle::TokenCount;

/// Unit of functions of whole layers that also output the logits of their routers, as `layer_1_router_logits`. No
/// plan has this unit: probes use it to see the experts chosen inside a shard.
pub const CHOICES_UNIT: &str = "choices";

/// Prefix of the names of a layer's values and weights, where a package has several layers.
pub(super) const LAYER_SCOPE: &str = "layer_";

/// Returns the prefix of the names of values and weights of layer `i` of a package: `layer_1_`.
pub fn layer_scope(i: usize) -> String {
    format!("{LAYER_SCOPE}{i}_")
}

/// Names a token count: `t4`, `t1to4`.
pub fn count_name(t: TokenCount) -> String {
    if t.min == t.max { format!("t{}", t.max) } else { format!("t{}to{}", t.min, t.max) }
}

/// Names the package of a shard that takes these token counts alone: `L00.attn.t4`.
pub fn package_name(shard: &str, t: TokenCount) -> String {
    format!("{shard}.{}", count_name(t))
}

/// Returns the prefix of a bank's matrices, from the bank's first expert: `bank_016`.
pub fn bank_name(first: usize) -> String {
    format!("bank_{first:03}")
}
