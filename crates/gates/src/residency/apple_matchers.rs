//! Matchers of forms that differ from those that Apple's own exporters write.

use super::graph::{Graph, Op};
use super::rule::{BundleFacts, Conditions, Hit, PackageFacts};

/// Slots from which on a separate function for short contexts saves more than a call costs: 8 MB of cache per layer
/// at heads of width 256.
const LONG_CONTEXT: u64 = 1024;

pub(super) fn cache_in_graph(g: &Graph, c: &Conditions) -> Option<Hit> {
    let m5 = c.chip.is_some_and(|chip| chip.mac && chip.number == 5);
    (!g.states.is_empty() && !m5)
        .then(|| Hit { detail: format!("{} in the graph", count(g.states.len())), advice: None })
}

fn count(states: usize) -> String {
    if states == 1 { "1 state".into() } else { format!("{states} states") }
}

/// Matches a value whose last axis is 1 at the border of the function.
pub(super) fn one_position_last(g: &Graph, _: &Conditions) -> Option<Hit> {
    let found = g.borders.iter().find(|(_, dims)| dims.len() == 4 && dims[3] == 1)?;
    Hit::new(format!("`{}` {:?}", found.0, found.1))
}

/// Fewest elements of a last axis by Apple's rule: 64 bytes in fp16.
const LAST_AXIS: u64 = 32;

/// Matches a value whose last axis is longer than 1, and shorter than 32 or no power of two, at the border of the function.
pub(super) fn uneven_last_axis(g: &Graph, _: &Conditions) -> Option<Hit> {
    let uneven = |n: u64| n > 1 && (n < LAST_AXIS || !n.is_power_of_two());
    let tokens_last = |dims: &[u64]| dims[1] > 1 && uneven(dims[3]);
    let found = || g.borders.iter().filter(|(_, dims)| dims.len() == 4 && uneven(dims[3]));
    if let Some((name, dims)) = found().find(|(_, dims)| tokens_last(dims)) {
        return Hit::new(format!("`{name}` {dims:?}"));
    }
    let (name, dims) = found().next()?;
    // No form changes a width of the model, or a matrix that the host makes: masks follow from the numbers of tokens.
    let advice = "a form keeps this width: it is the model's, or follows from tokens and context";
    Some(Hit { detail: format!("`{name}` {dims:?}"), advice: Some(advice.into()) })
}

/// Matches a constant of a mask that fp16 cannot hold: it becomes an infinity, and a row of infinities NaN.
pub(super) fn beyond_fp16(g: &Graph, _: &Conditions) -> Option<Hit> {
    Hit::new(format!("`{}`", g.beyond_fp16.as_ref()?))
}

/// Matches a language model that takes its prompts token by token.
pub(super) fn prompts_by_token(b: &BundleFacts, _: &Conditions) -> Option<Hit> {
    (b.most_tokens == Some(1)).then(Hit::default)
}

pub(super) fn heads_together(op: &Op, _: &Graph, _: &Conditions) -> Option<Hit> {
    let between = op.contraction.as_ref().is_some_and(|c| c.between_activations);
    let x = op.inputs.first()?.shape()?;
    let cached = op.inputs.iter().any(|t| t.shape().is_some_and(|s| s.len() == 4 && s[1] > 1 && s[2] >= 32));
    (op.op_type == "matmul" && between && cached && x.len() == 4 && x[1] > 1)
        .then(|| Hit { detail: format!("{} heads in one product", x[1]), advice: None })
}

pub(super) fn native_activation(op: &Op, _: &Graph, _: &Conditions) -> Option<Hit> {
    matches!(op.op_type.as_str(), "silu" | "gelu" | "tanh").then(Hit::default)
}

pub(super) fn gelu_m1(op: &Op, _: &Graph, c: &Conditions) -> Option<Hit> {
    (op.op_type == "gelu" && c.chip.is_some_and(|chip| chip.mac && chip.number == 1)).then(Hit::default)
}

/// Matches a norm that divides by the largest magnitude: `abs`, then `reduce_max`. A router has these ops in the other order.
pub(super) fn scaled_norm(g: &Graph, _: &Conditions) -> Option<Hit> {
    let largest = g.ops.windows(2).any(|pair| pair[0].op_type == "abs" && pair[1].op_type == "reduce_max");
    (largest && g.ops.iter().any(|op| op.op_type == "rsqrt")).then(Hit::default)
}

/// Matches attention over a long cache in every function of the package, without a function for a shorter context.
pub(super) fn long_context(p: &PackageFacts, _: &Conditions) -> Option<Hit> {
    let widest =
        |g: &Graph| g.ops.iter().filter(|op| op.op_type == "softmax").filter_map(|op| op.axis_extent).max();
    let slots: Vec<u64> = p.graphs.iter().filter_map(widest).collect();
    let longest = slots.iter().copied().max().filter(|&n| n >= LONG_CONTEXT)?;
    if slots.iter().any(|&n| n < longest) {
        return None;
    }
    Hit::new(format!("{longest} slots in every call"))
}

pub(super) fn functions_share_states(p: &PackageFacts, _: &Conditions) -> Option<Hit> {
    let stateful = p.graphs.iter().filter(|g| !g.states.is_empty()).count();
    (stateful > 1).then(|| Hit { detail: format!("{stateful} functions over states"), advice: None })
}

pub(super) fn one_layer(g: &Graph, _: &Conditions) -> Option<Hit> {
    (g.layers == Some(1) && g.matrix_count.is_some_and(|n| n >= 2) && !g.vocabulary_head).then(Hit::default)
}
