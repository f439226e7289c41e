//! Matchers of the rules: functions that decide whether a rule applies. Each threshold is stated here once; the
//! rule's evidence names its measurement.

use super::graph::{Graph, GraphWeight, LAYER_OPS, Op, SMALL_CONSTANT, Shapes, StoredForm};
use super::rule::{BundleFacts, Conditions, DeviceTarget, Hit, PackageFacts, Units};
use anemoe_convert::quant::Granularity;
use anemoe_mlpackage::mil::DataType;

/// Deepest sum of products that every chip takes, in terms.
pub const DEPTH: u64 = 16_384;
/// Deepest sum of products that any chip is reported to take, in terms.
pub const DEPTH_NEW: u64 = 65_536;
/// Depths of a lone fp16 product of one vector: up to the first on the CPU, from the second on the ANE.
const LONE_FP16: (u64, u64) = (4864, 5120);
/// Depths from which on a lone INT8 product runs on the ANE: of a `linear`, of a 1x1 convolution.
const LONE_INT8: (u64, u64) = (4096, 3072);
/// Most bytes of weights that a program can address.
pub const PROGRAM_BYTES: u64 = 1 << 31;
/// Bytes of a program with a vocabulary head: above the first doubtful, from the second on failed.
const HEAD_BYTES: (u64, u64) = (1_000_000_000, 1_500_000_000);
/// Bytes of a package on an iPhone: above the first doubtful, above the second failed.
const IPHONE_BYTES: (u64, u64) = (950_000_000, 1_400_000_000);
/// Layers of a package on an iPhone: above the first doubtful, from the second on failed.
const IPHONE_LAYERS: (u64, u64) = (15, 35);
/// Bytes of weights up to which all measured graphs were placed on the CPU.
const TINY_BYTES: u64 = 1_000_000;
/// Bytes of the smallest layer graph that was measured on the ANE, in INT8: one byte per weight.
const LAYER_BYTES: u64 = 4_000_000;
/// Bytes of the same number of weights in fp16.
const LAYER_BYTES_FP16: u64 = 2 * LAYER_BYTES;
/// Bytes of the smallest graph with tables that was measured on the ANE.
const LUT_BYTES: u64 = 30_000_000;
/// Bytes of the largest feed-forward graphs (packs of experts, MLPs) that were measured on the ANE: in fp16 (216
/// MiB), with integers (227 MiB), with tables.
const FEED_FORWARD_MOST: Largest = Largest { fp16: 226_500_000, int8: 238_000_000, lut: 101_200_000 };
/// Bytes of the largest graphs of layers with attention that were measured on the ANE. With tables, none of that size
/// was measured.
const ATTENTION_MOST: Largest = Largest { fp16: 950_000_000, int8: 2_015_800_000, lut: 101_200_000 };
/// Bytes of the largest graph of a few fp16 products that was measured on the ANE.
const FEW_MOST: u64 = 127_000_000;
/// Factor of bytes by which a graph may differ from a measured one to be judged by it. Between agreeing measurements
/// of one form the widest step is 2.2 (tables, 46 to 101 MB) or 2 (INT8, 96 to 192 MB). Larger steps were not measured.
const NEAREST: u64 = 2;
/// Bytes of packs that are said to go to the GPU: 364 and 398 MB, where MB may be MiB.
const DISPUTED_BYTES: (u64, u64) = (364_000_000, 417_400_000);
/// Bytes of a few fp16 products: up to the first on the CPU, from the second on the ANE.
const FEW_OPS_BYTES: (u64, u64) = (25_200_000, 50_000_000);
/// Bytes below which graphs with block-scaled INT4 always ran on the CPU; above, on either side.
const BLOCK_BYTES: u64 = 100_000_000;
/// Bytes below which graphs with block-scaled INT8 are predicted on the CPU, by the one size that was measured.
const BLOCK8_BYTES: u64 = 200_000_000;
/// Positions of a call from which on a whole graph of small width is placed on the ANE.
const MANY_POSITIONS: u64 = 64;
/// Most positions of a call that counts as decoding.
const FEW_POSITIONS: u64 = 8;
/// Sizes of a range: up to the first on the ANE, above the second not on the ANE.
const RANGE: (u64, u64) = (4, 32);
/// Widest softmax row that was seen on the ANE.
const SOFTMAX: u64 = 2048;
/// Elements of the query of a lone fused attention: up to the first on the CPU, from the second on the ANE.
const ATTENTION: (u64, u64) = (1 << 20, 1 << 21);
/// Longest axis whose search for the largest element may stay on the ANE.
const SEARCH: u64 = 2048;

/// Returns a number of bytes as text, in kB or MB.
pub(super) fn size(bytes: u64) -> String {
    match bytes {
        0..=999_999 => format!("{:.1} kB", bytes as f64 / 1e3),
        _ => format!("{:.1} MB", bytes as f64 / 1e6),
    }
}

fn types_of(op: &Op, wanted: impl Fn(DataType) -> bool) -> Option<DataType> {
    op.inputs.iter().chain(&op.outputs).map(|t| t.dtype).find(|&d| wanted(d))
}

fn weights<'a>(op: &Op, g: &'a Graph) -> impl Iterator<Item = &'a GraphWeight> {
    op.weights.clone().into_iter().filter_map(|i| g.weights.get(i)).filter(|w| {
        w.bytes >= SMALL_CONSTANT || matches!(w.form, StoredForm::Lut { .. } | StoredForm::Linear { .. })
    })
}

// Types

pub(super) fn fp32(op: &Op, _: &Graph, _: &Conditions) -> Option<Hit> {
    // Casts at the border of a program are ops of their own, and were seen on the ANE.
    let float = types_of(op, |d| matches!(d, DataType::Float32 | DataType::Float64))?;
    (op.op_type != "cast").then(|| Hit { detail: format!("computes in {float}"), advice: None })
}

pub(super) fn bf16(op: &Op, _: &Graph, _: &Conditions) -> Option<Hit> {
    types_of(op, |d| matches!(d, DataType::BFloat16 | DataType::Float8E4M3FN | DataType::Float8E5M2))
        .and_then(|d| Hit::new(format!("computes in {d}")))
}

pub(super) fn integers(op: &Op, _: &Graph, _: &Conditions) -> Option<Hit> {
    if matches!(op.op_type.as_str(), "cast" | "quantize" | "dequantize") {
        return None;
    }
    types_of(op, DataType::is_int).and_then(|d| Hit::new(format!("computes on {d}")))
}

pub(super) fn cast_integer(op: &Op, g: &Graph, _: &Conditions) -> Option<Hit> {
    if op.op_type != "cast" {
        return None;
    }
    if op.inputs.is_empty() && op.outputs.is_empty() {
        // In a summary, a cast beside a search for the largest elements can only be a cast of indices.
        let searches = |o: &Op| matches!(o.op_type.as_str(), "topk" | "reduce_argmax" | "argsort");
        return g.ops.iter().any(searches).then(|| Hit { detail: "casts indices".into(), advice: None });
    }
    types_of(op, DataType::is_int).and_then(|d| Hit::new(format!("casts from or to {d}")))
}

// Shapes

pub(super) fn rank_over_5(op: &Op, _: &Graph, _: &Conditions) -> Option<Hit> {
    let rank = op.inputs.iter().chain(&op.outputs).map(|t| t.rank()).max()?;
    (rank > 5).then(|| Hit { detail: format!("rank {rank}"), advice: None })
}

pub(super) fn rank_2_linear(op: &Op, g: &Graph, _: &Conditions) -> Option<Hit> {
    let x = op.inputs.first()?;
    (op.op_type == "linear" && x.rank() == 2 && g.at_least_ops() >= LAYER_OPS)
        .then(|| Hit { detail: format!("input {x}"), advice: None })
}

pub(super) fn batch_over_pixels(op: &Op, _: &Graph, _: &Conditions) -> Option<Hit> {
    let x = op.inputs.first()?.shape()?;
    (op.op_type == "conv" && x.len() == 4 && x[0] >= MANY_POSITIONS && x[2..] == [1, 1]).then(|| Hit {
        detail: format!("input {x:?}"),
        advice: Some(format!("move the batch to the last axis: [1, {}, 1, {}]", x[1], x[0])),
    })
}

pub(super) fn last_axis_of_one(op: &Op, _: &Graph, _: &Conditions) -> Option<Hit> {
    let x = op.inputs.first()?.shape()?;
    let large = op.inputs.first()?.elements().is_some_and(|n| n >= 1 << 16);
    (matches!(op.op_type.as_str(), "conv" | "matmul" | "softmax")
        && x.len() > 2
        && large
        && x.last() == Some(&1))
    .then(|| Hit { detail: format!("input {x:?}"), advice: None })
}

fn deep(op: &Op) -> Option<u64> {
    op.contraction.as_ref()?.depth.filter(|&k| k > DEPTH)
}

fn split_depth(k: u64) -> Option<String> {
    let parts = k.div_ceil(DEPTH);
    Some(format!("cut the {k} inputs into {parts} and add the results"))
}

pub(super) fn depth(op: &Op, _: &Graph, c: &Conditions) -> Option<Hit> {
    let k = deep(op)?;
    let possible = c.chip.is_some_and(|c| c.wide_extents()) && k <= DEPTH_NEW;
    (!possible).then(|| Hit { detail: format!("depth {k}"), advice: split_depth(k) })
}

pub(super) fn depth_new_chip(op: &Op, _: &Graph, c: &Conditions) -> Option<Hit> {
    let k = deep(op)?;
    let possible = c.chip.is_some_and(|c| c.wide_extents()) && k <= DEPTH_NEW;
    possible.then(|| Hit { detail: format!("depth {k}"), advice: split_depth(k) })
}

pub(super) fn spatial(op: &Op, _: &Graph, c: &Conditions) -> Option<Hit> {
    if !matches!(op.op_type.as_str(), "conv" | "conv_transpose" | "avg_pool" | "max_pool" | "l2_pool") {
        return None;
    }
    let limit = if c.chip.is_some_and(|c| c.wide_extents()) { DEPTH_NEW } else { DEPTH };
    let x = op.inputs.first()?.shape()?;
    let extent = *x.get(2..)?.iter().max()?;
    (extent > limit).then(|| Hit { detail: format!("extent {extent}"), advice: None })
}

pub(super) fn image(op: &Op, _: &Graph, _: &Conditions) -> Option<Hit> {
    let x = op.inputs.first()?.shape()?;
    (op.op_type == "conv" && x.len() == 4 && x[2].min(x[3]) >= 5568)
        .then(|| Hit { detail: format!("input {x:?}"), advice: None })
}

pub(super) fn runtime_bound(op: &Op, _: &Graph, _: &Conditions) -> Option<Hit> {
    (!op.runtime_bounds.is_empty())
        .then(|| Hit { detail: format!("{} come from data", op.runtime_bounds.join(", ")), advice: None })
}

// Ops with conditions

pub(super) fn search_wide(op: &Op, _: &Graph, _: &Conditions) -> Option<Hit> {
    let searches = matches!(op.op_type.as_str(), "topk" | "reduce_argmax" | "reduce_argmin");
    let n = op.axis_extent.filter(|&n| searches && n > SEARCH)?;
    Hit::new(format!("{} over {n} elements", op.op_type))
}

pub(super) fn search(op: &Op, _: &Graph, _: &Conditions) -> Option<Hit> {
    let searches = matches!(op.op_type.as_str(), "topk" | "reduce_argmax" | "reduce_argmin");
    let wide = op.axis_extent.is_some_and(|n| n > SEARCH);
    (searches && !wide).then(|| Hit {
        detail: op.axis_extent.map_or(op.op_type.clone(), |n| format!("{} over {n} elements", op.op_type)),
        advice: None,
    })
}

fn is_trigonometric(op: &Op) -> bool {
    matches!(op.op_type.as_str(), "sin" | "cos")
}

pub(super) fn trigonometry_old(op: &Op, _: &Graph, c: &Conditions) -> Option<Hit> {
    (is_trigonometric(op) && c.chip.is_some_and(|c| !c.trigonometry())).then(Hit::default)
}

pub(super) fn trigonometry_unknown(op: &Op, _: &Graph, c: &Conditions) -> Option<Hit> {
    (is_trigonometric(op) && c.chip.is_none()).then(Hit::default)
}

pub(super) fn trigonometry_new(op: &Op, _: &Graph, c: &Conditions) -> Option<Hit> {
    (is_trigonometric(op) && c.chip.is_some_and(|c| c.trigonometry())).then(Hit::default)
}

fn quantizes(op: &Op) -> bool {
    matches!(op.op_type.as_str(), "quantize" | "dequantize")
}

pub(super) fn activations_iphone(op: &Op, _: &Graph, c: &Conditions) -> Option<Hit> {
    (quantizes(op) && c.target == DeviceTarget::Iphone).then(Hit::default)
}

pub(super) fn activations_mac(op: &Op, _: &Graph, c: &Conditions) -> Option<Hit> {
    (quantizes(op) && c.target == DeviceTarget::Mac).then(Hit::default)
}

pub(super) fn loose_update(op: &Op, _: &Graph, _: &Conditions) -> Option<Hit> {
    (op.op_type == "slice_update" && !op.updates_state && !op.inputs.is_empty()).then(Hit::default)
}

pub(super) fn state_op(op: &Op, _: &Graph, _: &Conditions) -> Option<Hit> {
    (op.op_type == "slice_update" && (op.updates_state || op.inputs.is_empty())).then(Hit::default)
}

pub(super) fn softmax_wide(op: &Op, _: &Graph, _: &Conditions) -> Option<Hit> {
    let n = op.axis_extent.filter(|&n| op.op_type == "softmax" && n > SOFTMAX)?;
    Hit::new(format!("rows of {n}"))
}

/// Returns the elements of the largest operand of a fused attention; `None` for other ops.
fn attention_elements(op: &Op) -> Option<u64> {
    if op.op_type != "scaled_dot_product_attention" {
        return None;
    }
    op.inputs.iter().filter_map(|t| t.elements()).max()
}

/// Returns the elements of each operand, where a fused attention is all that a graph has.
fn lone_attention(g: &Graph) -> Option<u64> {
    (g.at_least_ops() < LAYER_OPS).then(|| g.ops.iter().find_map(attention_elements))?
}

pub(super) fn attention_small(g: &Graph, _: &Conditions) -> Option<Hit> {
    let n = lone_attention(g).filter(|&n| n <= ATTENTION.0)?;
    Hit::new(format!("{n} elements each"))
}

pub(super) fn attention_large(g: &Graph, _: &Conditions) -> Option<Hit> {
    let n = lone_attention(g).filter(|&n| n >= ATTENTION.1)?;
    Hit::new(format!("{n} elements each"))
}

pub(super) fn attention_unclear(op: &Op, g: &Graph, _: &Conditions) -> Option<Hit> {
    let n = attention_elements(op);
    let decided = n.is_some_and(|n| n <= ATTENTION.0 || n >= ATTENTION.1) && g.at_least_ops() < LAYER_OPS;
    (op.op_type == "scaled_dot_product_attention" && !decided)
        .then(|| Hit { detail: n.map(|n| format!("{n} elements each")).unwrap_or_default(), advice: None })
}

pub(super) fn conv_3d(op: &Op, _: &Graph, _: &Conditions) -> Option<Hit> {
    let kernel = &op.contraction.as_ref()?.kernel;
    (kernel.len() >= 3).then(|| Hit { detail: format!("kernel {kernel:?}"), advice: None })
}

pub(super) fn wide_window(op: &Op, _: &Graph, _: &Conditions) -> Option<Hit> {
    let kernel = op.contraction.as_ref().and_then(|c| c.kernel.iter().max().copied());
    let limit = if op.op_type.starts_with("upsample") { 2 } else { 13 };
    let n = kernel.max(op.window).filter(|&n| n > limit)?;
    Hit::new(format!("extent {n}"))
}

fn depthwise(op: &Op) -> bool {
    op.contraction.as_ref().is_some_and(|c| c.groups > 1 && c.depth == Some(1))
}

pub(super) fn depthwise_table(op: &Op, g: &Graph, _: &Conditions) -> Option<Hit> {
    let table =
        |i: &usize| matches!(g.weights.get(*i).map(|w| &w.form), Some(StoredForm::Lut { bits: 4, .. }));
    (depthwise(op) && op.weights.iter().any(table)).then(Hit::default)
}

pub(super) fn depthwise_step(op: &Op, _: &Graph, _: &Conditions) -> Option<Hit> {
    let c = op.contraction.as_ref()?;
    let one_axis = c.kernel.iter().filter(|&&n| n > 1).count() == 1;
    (depthwise(op) && one_axis && c.positions.is_some_and(|p| p <= FEW_POSITIONS)).then(Hit::default)
}

pub(super) fn layer_norm(op: &Op, _: &Graph, _: &Conditions) -> Option<Hit> {
    (op.op_type == "layer_norm").then(Hit::default)
}

fn many_channels(op: &Op) -> Option<Hit> {
    let n = op.contraction.as_ref()?.outputs.filter(|&n| op.op_type == "conv" && n > DEPTH_NEW)?;
    Some(Hit {
        detail: format!("{n} output channels"),
        advice: Some(format!("cut the outputs in {} parts", n.div_ceil(DEPTH_NEW))),
    })
}

pub(super) fn channels_old(op: &Op, _: &Graph, c: &Conditions) -> Option<Hit> {
    many_channels(op).filter(|_| c.chip.is_some_and(|chip| chip.limits_channels()))
}

pub(super) fn channels(op: &Op, _: &Graph, c: &Conditions) -> Option<Hit> {
    many_channels(op).filter(|_| c.chip.is_none())
}

fn joined_pieces(op: &Op) -> Option<Hit> {
    (op.later_pieces >= 2).then(|| Hit { detail: format!("{} such pieces", op.later_pieces), advice: None })
}

pub(super) fn joined_pieces_m2(op: &Op, _: &Graph, c: &Conditions) -> Option<Hit> {
    joined_pieces(op).filter(|_| c.chip.is_some_and(|chip| chip.mac && chip.number <= 3))
}

pub(super) fn joined_pieces_any(op: &Op, _: &Graph, c: &Conditions) -> Option<Hit> {
    joined_pieces(op).filter(|_| c.chip.is_none())
}

pub(super) fn table_stride(op: &Op, g: &Graph, _: &Conditions) -> Option<Hit> {
    let stride = op.stride.filter(|&n| op.op_type == "conv" && n > 2)?;
    table_where(op, g, |f| matches!(f, StoredForm::Lut { .. }))
        .map(|hit| Hit { detail: format!("stride {stride}, {}", hit.detail), ..hit })
}

// Compression

fn table_where(op: &Op, g: &Graph, wanted: impl Fn(&StoredForm) -> bool) -> Option<Hit> {
    let w = weights(op, g).find(|w| wanted(&w.form))?;
    Hit::new(format!("weight `{}` {:?}: {}", w.name, w.dims, w.form.describe()))
}

pub(super) fn table_two_axes(op: &Op, g: &Graph, _: &Conditions) -> Option<Hit> {
    table_where(op, g, |f| matches!(f, StoredForm::Lut { grouped_axes, .. } if grouped_axes.len() > 1))
}

pub(super) fn table_scaled(op: &Op, g: &Graph, _: &Conditions) -> Option<Hit> {
    table_where(
        op,
        g,
        |f| matches!(f, StoredForm::Lut { scaled: true, entries, .. } if *entries != DataType::Int8),
    )
}

pub(super) fn table_int8(op: &Op, g: &Graph, _: &Conditions) -> Option<Hit> {
    table_where(op, g, |f| matches!(f, StoredForm::Lut { entries: DataType::Int8 | DataType::UInt8, .. }))
}

pub(super) fn table_vector(op: &Op, g: &Graph, _: &Conditions) -> Option<Hit> {
    table_where(op, g, |f| matches!(f, StoredForm::Lut { vector, .. } if *vector > 1))
}

pub(super) fn sparse(op: &Op, g: &Graph, _: &Conditions) -> Option<Hit> {
    table_where(op, g, |f| matches!(f, StoredForm::Sparse))
}

pub(super) fn int4_whole(op: &Op, g: &Graph, _: &Conditions) -> Option<Hit> {
    table_where(op, g, |f| {
        matches!(f, StoredForm::Linear { bits: 0..=7, grain: Granularity::Tensor | Granularity::Channel })
    })
}

pub(super) fn unstated_form(op: &Op, g: &Graph, _: &Conditions) -> Option<Hit> {
    table_where(op, g, |f| matches!(f, StoredForm::Unstated))
}

fn blocks(g: &Graph) -> Option<(u64, u64)> {
    let blocked = |w: &&GraphWeight| matches!(w.form, StoredForm::Linear { grain: Granularity::Block, .. });
    let bits = g.weights.iter().filter(blocked).filter_map(|w| match w.form {
        StoredForm::Linear { bits, .. } => Some(bits),
        _ => None,
    });
    // All ops of a small graph leave the ANE with its blocks, so the bytes of the whole graph count.
    bits.min().map(|bits| (bits, g.weight_bytes.unwrap_or(0)))
}

pub(super) fn blocks_small(g: &Graph, _: &Conditions) -> Option<Hit> {
    let (bits, bytes) = blocks(g)?;
    let limit = if bits <= 4 { BLOCK_BYTES } else { BLOCK8_BYTES };
    (bytes < limit).then(|| Hit { detail: format!("int{bits} per block, {}", size(bytes)), advice: None })
}

pub(super) fn blocks_large(g: &Graph, _: &Conditions) -> Option<Hit> {
    let (bits, bytes) = blocks(g)?;
    let limit = if bits <= 4 { BLOCK_BYTES } else { BLOCK8_BYTES };
    (bytes >= limit).then(|| Hit { detail: format!("int{bits} per block, {}", size(bytes)), advice: None })
}

// States and flexible shapes

pub(super) fn state_width(g: &Graph, _: &Conditions) -> Option<Hit> {
    let (s, width) =
        g.states.iter().find_map(|s| s.dims.last().filter(|w| !w.is_multiple_of(32)).map(|w| (s, w)))?;
    Some(Hit {
        detail: format!("state `{}` {:?}", s.name, s.dims),
        advice: Some(format!("pad the state `{}` to a width of {}", s.name, width.next_multiple_of(32))),
    })
}

pub(super) fn states_two(g: &Graph, _: &Conditions) -> Option<Hit> {
    (g.states.len() == 2).then(|| Hit { detail: "2 states".into(), advice: None })
}

pub(super) fn states_many(g: &Graph, _: &Conditions) -> Option<Hit> {
    (g.states.len() > 2).then(|| Hit { detail: format!("{} states", g.states.len()), advice: None })
}

pub(super) fn joined_write(op: &Op, _: &Graph, _: &Conditions) -> Option<Hit> {
    op.writes_joined.then(Hit::default)
}

pub(super) fn state_m5(g: &Graph, c: &Conditions) -> Option<Hit> {
    (!g.states.is_empty() && c.chip.is_some_and(|chip| chip.mac && chip.number == 5)).then(Hit::default)
}

pub(super) fn enumerated_state(g: &Graph, _: &Conditions) -> Option<Hit> {
    (g.shapes == Shapes::Enumerated && !g.states.is_empty()).then(Hit::default)
}

pub(super) fn enumerated_norm(g: &Graph, _: &Conditions) -> Option<Hit> {
    (g.shapes == Shapes::Enumerated && g.ops.iter().any(|op| op.op_type == "layer_norm")).then(Hit::default)
}

pub(super) fn enumerated(g: &Graph, _: &Conditions) -> Option<Hit> {
    (g.shapes == Shapes::Enumerated).then(Hit::default)
}

fn range(g: &Graph, wanted: impl Fn(Option<u64>) -> bool) -> Option<Hit> {
    let Shapes::Ranged(bound) = g.shapes else { return None };
    wanted(bound).then(|| Hit {
        detail: bound.map_or("no upper bound".into(), |b| format!("{b} sizes")),
        advice: None,
    })
}

pub(super) fn range_wide(g: &Graph, _: &Conditions) -> Option<Hit> {
    range(g, |b| b.is_none_or(|b| b > RANGE.1))
}

pub(super) fn range_middle(g: &Graph, _: &Conditions) -> Option<Hit> {
    range(g, |b| b.is_some_and(|b| b > RANGE.0 && b <= RANGE.1))
}

pub(super) fn range_tiny(g: &Graph, _: &Conditions) -> Option<Hit> {
    range(g, |b| b.is_some_and(|b| b <= RANGE.0))
}

// Preference

/// Returns the only weighted product of a graph with few other ops, and its depth.
fn lone(g: &Graph) -> Option<(&Op, u64)> {
    let mut matrices = g.matrices();
    let (op, c) = matrices.next()?;
    (matrices.next().is_none() && g.at_least_ops() < LAYER_OPS).then_some((op, c.depth?))
}

fn lone_form<'a>(op: &Op, g: &'a Graph) -> Option<&'a StoredForm> {
    op.weights.iter().filter_map(|&i| g.weights.get(i)).max_by_key(|w| w.bytes).map(|w| &w.form)
}

fn int8(form: &StoredForm) -> bool {
    matches!(form, StoredForm::Linear { bits: 8, grain: Granularity::Tensor | Granularity::Channel })
}

fn few_positions(g: &Graph) -> bool {
    g.positions.is_none_or(|p| p <= FEW_POSITIONS)
}

pub(super) fn lone_shallow(g: &Graph, _: &Conditions) -> Option<Hit> {
    let (op, k) = lone(g)?;
    let dense = matches!(lone_form(op, g)?, StoredForm::Dense(_));
    (dense && op.op_type != "conv" && k <= LONE_FP16.0 && few_positions(g))
        .then(|| Hit { detail: format!("one product of depth {k}"), advice: None })
}

pub(super) fn lone_deep(g: &Graph, _: &Conditions) -> Option<Hit> {
    let (op, k) = lone(g)?;
    let form = lone_form(op, g)?;
    let conv = op.op_type == "conv";
    let from = match form {
        StoredForm::Dense(_) => LONE_FP16.1,
        f if int8(f) && conv => LONE_INT8.1,
        f if int8(f) => LONE_INT8.0,
        _ => return None,
    };
    (k >= from && k <= DEPTH).then(|| Hit { detail: format!("one product of depth {k}"), advice: None })
}

/// Returns the number of multiplications of a lone product of two computed matrices.
fn lone_product(g: &Graph) -> Option<u64> {
    let mut all = g.ops.iter().filter_map(|op| op.contraction.as_ref());
    let c = all.next().filter(|c| c.between_activations)?;
    (all.next().is_none() && g.at_least_ops() < LAYER_OPS)
        .then(|| Some(c.depth?.saturating_mul(c.outputs?).saturating_mul(c.positions?)))?
}

pub(super) fn product_small(g: &Graph, _: &Conditions) -> Option<Hit> {
    let n = lone_product(g)?;
    (n <= 384 * 384 * 384).then(|| Hit { detail: format!("{n} multiplications"), advice: None })
}

pub(super) fn product_large(g: &Graph, _: &Conditions) -> Option<Hit> {
    let n = lone_product(g)?;
    (n >= 512 * 512 * 512).then(|| Hit { detail: format!("{n} multiplications"), advice: None })
}

/// Tells whether a graph has several weighted products and few other ops.
fn has_few_ops(g: &Graph) -> bool {
    let n = g.matrices().count();
    n >= 2 && g.at_least_ops() < LAYER_OPS
}

pub(super) fn few_small(g: &Graph, _: &Conditions) -> Option<Hit> {
    let bytes = g.weight_bytes?;
    let shallow = g.matrices().all(|(_, c)| c.depth.is_none_or(|k| k < LONE_FP16.1));
    (has_few_ops(g) && g.is_fp16() && shallow && few_positions(g) && bytes <= FEW_OPS_BYTES.0)
        .then(|| Hit { detail: format!("{} ops, {}", g.at_least_ops(), size(bytes)), advice: None })
}

pub(super) fn few_large(g: &Graph, _: &Conditions) -> Option<Hit> {
    let bytes = g.weight_bytes.filter(|&b| b <= NEAREST * FEW_MOST)?;
    (has_few_ops(g) && g.is_fp16() && bytes >= FEW_OPS_BYTES.1)
        .then(|| Hit { detail: format!("{} ops, {}", g.at_least_ops(), size(bytes)), advice: None })
}

pub(super) fn few_int8_convs(g: &Graph, _: &Conditions) -> Option<Hit> {
    let bytes = g.weight_bytes?;
    let convs = g.matrices().all(|(op, _)| op.op_type == "conv");
    let stored = g.weights.iter().filter(|w| w.bytes >= SMALL_CONSTANT).all(|w| int8(&w.form));
    (has_few_ops(g) && convs && stored && (LAYER_BYTES..=NEAREST * FEED_FORWARD_MOST.int8).contains(&bytes))
        .then(|| Hit { detail: format!("{} ops, {}", g.at_least_ops(), size(bytes)), advice: None })
}

pub(super) fn tiny(g: &Graph, _: &Conditions) -> Option<Hit> {
    let bytes = g.weight_bytes.filter(|_| !g.weights.is_empty())?;
    (bytes <= TINY_BYTES && g.positions.is_none_or(|p| p < MANY_POSITIONS))
        .then(|| Hit { detail: format!("{} of weights", size(bytes)), advice: None })
}

pub(super) fn trivial(g: &Graph, _: &Conditions) -> Option<Hit> {
    let few = g.op_count.is_some_and(|n| n <= 8);
    let multiplies =
        g.ops.iter().any(|op| op.contraction.is_some() || op.op_type == "scaled_dot_product_attention");
    (few && (g.weight_bytes.is_none() || g.weights.is_empty()) && few_positions(g) && !multiplies)
        .then(|| Hit { detail: format!("{} ops", g.at_least_ops()), advice: None })
}

pub(super) fn glue(g: &Graph, _: &Conditions) -> Option<Hit> {
    let small = g.weight_bytes.is_none_or(|b| b <= 40_000_000);
    (g.glue && small).then(|| Hit {
        detail: format!("{} ops around {} products", g.at_least_ops(), g.matrices().count()),
        advice: None,
    })
}

/// Tells whether a graph is one of layers: enough ops surround its products for the ANE to take small depths.
fn layers(g: &Graph) -> bool {
    g.at_least_ops() >= LAYER_OPS && g.matrix_count.is_none_or(|n| n >= 2) && !g.glue
}

/// Returns the bytes of the smallest layer graph of the same storage form that was measured on the ANE.
fn smallest(g: &Graph) -> u64 {
    if g.lut_bytes() > g.weight_bytes.unwrap_or(0) / 2 {
        LUT_BYTES
    } else if g.is_fp16() {
        LAYER_BYTES_FP16
    } else {
        LAYER_BYTES
    }
}

pub(super) fn below_measured(g: &Graph, _: &Conditions) -> Option<Hit> {
    let bytes = g.weight_bytes.filter(|&b| b > TINY_BYTES)?;
    let decodes = g.positions.is_none_or(|p| p < MANY_POSITIONS);
    // Graphs of few ops in FP16 have rules of their own.
    let alike = layers(g) || has_few_ops(g) && !g.is_fp16();
    (alike && decodes && g.forms_seen() && NEAREST * bytes < smallest(g)).then(|| Hit {
        detail: format!("{}, and the smallest measured in this form has {}", size(bytes), size(smallest(g))),
        advice: None,
    })
}

pub(super) fn layer_graph(g: &Graph, c: &Conditions) -> Option<Hit> {
    let bytes = g.weight_bytes?;
    let lost_to_gpu = c.units == Units::All && few_positions(g);
    (layers(g) && g.forms_seen() && !lost_to_gpu && (smallest(g)..=NEAREST * largest(g)).contains(&bytes))
        .then(|| Hit { detail: format!("{} ops, {}", g.at_least_ops(), size(bytes)), advice: None })
}

/// Bytes of the largest measured graphs, by the storage form of most of their weights.
struct Largest {
    fp16: u64,
    int8: u64,
    lut: u64,
}

/// Tells whether a graph has no attention and no states: a pack of experts, an MLP.
fn feeds_forward(g: &Graph) -> bool {
    let attends = |op: &Op| {
        op.op_type == "scaled_dot_product_attention"
            || op.contraction.as_ref().is_some_and(|c| c.between_activations)
    };
    // Where ops are not listed, several layers are whole layers with attention.
    let whole = g.matrix_count.is_none() && g.layers.is_some_and(|n| n > 1);
    g.states.is_empty() && !g.vocabulary_head && !whole && !g.ops.iter().any(attends)
}

/// Returns the bytes of the largest graph of the same kind and storage form that was measured on the ANE.
fn largest(g: &Graph) -> u64 {
    let most = if feeds_forward(g) { FEED_FORWARD_MOST } else { ATTENTION_MOST };
    if g.lut_bytes() > g.weight_bytes.unwrap_or(0) / 2 {
        most.lut
    } else if g.is_fp16() {
        most.fp16
    } else {
        most.int8
    }
}

pub(super) fn beyond_measured(g: &Graph, _: &Conditions) -> Option<Hit> {
    let bytes = g.weight_bytes?;
    let most = if has_few_ops(g) && g.is_fp16() { FEW_MOST } else { largest(g) };
    let kind = if feeds_forward(g) { "without attention" } else { "with attention" };
    ((layers(g) || has_few_ops(g)) && bytes > NEAREST * most).then(|| Hit {
        detail: format!("{}, and the largest measured {kind} in this form has {}", size(bytes), size(most)),
        advice: Some(format!("split the package below {}", size(NEAREST * most))),
    })
}

pub(super) fn size_disputed(g: &Graph, _: &Conditions) -> Option<Hit> {
    let bytes = g.weight_bytes.filter(|b| (DISPUTED_BYTES.0..=DISPUTED_BYTES.1).contains(b))?;
    ((layers(g) || has_few_ops(g)) && feeds_forward(g)).then(|| Hit { detail: size(bytes), advice: None })
}

pub(super) fn many_positions(g: &Graph, _: &Conditions) -> Option<Hit> {
    let positions = g.positions.filter(|&p| p >= MANY_POSITIONS)?;
    let seen = g.weight_bytes.is_none_or(|b| b >= LAYER_BYTES) && g.is_fp16() && g.forms_seen();
    (layers(g) && seen).then(|| Hit { detail: format!("{positions} positions a call"), advice: None })
}

pub(super) fn gpu_decodes(g: &Graph, c: &Conditions) -> Option<Hit> {
    (c.units == Units::All && layers(g) && g.is_fp16() && few_positions(g)).then(Hit::default)
}

pub(super) fn gpu_large(g: &Graph, c: &Conditions) -> Option<Hit> {
    let bytes = g.weight_bytes?;
    (c.units == Units::All && bytes >= HEAD_BYTES.0).then(|| Hit { detail: size(bytes), advice: None })
}

pub(super) fn gpu_int8(g: &Graph, c: &Conditions) -> Option<Hit> {
    (c.units == Units::All && !g.is_fp16()).then(Hit::default)
}

pub(super) fn mixed_functions(p: &PackageFacts, c: &Conditions) -> Option<Hit> {
    mixed(p).filter(|_| c.units == Units::CpuAndNe)
}

pub(super) fn mixed_functions_gpu(p: &PackageFacts, c: &Conditions) -> Option<Hit> {
    mixed(p).filter(|_| c.units == Units::All)
}

fn mixed(p: &PackageFacts) -> Option<Hit> {
    let positions = || p.graphs.iter().filter_map(|g| g.positions);
    let (low, high) = (positions().min()?, positions().max()?);
    (p.graphs.len() > 1 && low <= FEW_POSITIONS && high >= MANY_POSITIONS)
        .then(|| Hit { detail: format!("functions for {low} and for {high} positions"), advice: None })
}

// Loading

fn parts(bytes: u64, limit: u64) -> Option<String> {
    Some(format!("split the package in {}", bytes.div_ceil(limit)))
}

pub(super) fn program_size(p: &PackageFacts, _: &Conditions) -> Option<Hit> {
    let bytes = p.weight_bytes.filter(|&b| b > PROGRAM_BYTES)?;
    Some(Hit { detail: size(bytes), advice: parts(bytes, PROGRAM_BYTES) })
}

fn head(p: &PackageFacts) -> Option<u64> {
    let stack = |g: &Graph| g.vocabulary_head && layers(g);
    p.weight_bytes.filter(|_| p.graphs.iter().any(stack))
}

pub(super) fn head_fails(p: &PackageFacts, _: &Conditions) -> Option<Hit> {
    let bytes = head(p).filter(|&b| (HEAD_BYTES.1..=PROGRAM_BYTES).contains(&b))?;
    Hit::new(size(bytes))
}

pub(super) fn head_risk(p: &PackageFacts, _: &Conditions) -> Option<Hit> {
    let bytes = head(p).filter(|&b| b > HEAD_BYTES.0 && b < HEAD_BYTES.1)?;
    Hit::new(size(bytes))
}

pub(super) fn iphone_size(p: &PackageFacts, c: &Conditions) -> Option<Hit> {
    let bytes = p.weight_bytes.filter(|&b| c.target == DeviceTarget::Iphone && b > IPHONE_BYTES.1)?;
    Some(Hit { detail: size(bytes), advice: parts(bytes, IPHONE_BYTES.0) })
}

pub(super) fn iphone_margin(p: &PackageFacts, c: &Conditions) -> Option<Hit> {
    let bytes = p
        .weight_bytes
        .filter(|&b| c.target == DeviceTarget::Iphone && b > IPHONE_BYTES.0 && b <= IPHONE_BYTES.1)?;
    Some(Hit { detail: size(bytes), advice: parts(bytes, IPHONE_BYTES.0) })
}

pub(super) fn iphone_states(p: &PackageFacts, c: &Conditions) -> Option<Hit> {
    let dual = p.graphs.iter().any(|g| g.states.len() > 1 && g.positions.is_some_and(|n| n > 1));
    (c.target == DeviceTarget::Iphone && p.graphs.len() > 1 && dual).then(Hit::default)
}

fn most_layers(p: &PackageFacts, c: &Conditions) -> Option<u64> {
    p.graphs.iter().filter_map(|g| g.layers).max().filter(|_| c.target == DeviceTarget::Iphone)
}

pub(super) fn iphone_layers(p: &PackageFacts, c: &Conditions) -> Option<Hit> {
    let n = most_layers(p, c).filter(|n| (IPHONE_LAYERS.0 + 1..IPHONE_LAYERS.1).contains(n))?;
    Hit::new(format!("{n} layers"))
}

pub(super) fn iphone_merged(p: &PackageFacts, c: &Conditions) -> Option<Hit> {
    let n = most_layers(p, c).filter(|&n| n >= IPHONE_LAYERS.1)?;
    Hit::new(format!("{n} layers"))
}

pub(super) fn functions_many(p: &PackageFacts, _: &Conditions) -> Option<Hit> {
    (p.graphs.len() > 256).then(|| Hit { detail: format!("{} functions", p.graphs.len()), advice: None })
}

pub(super) fn together(b: &BundleFacts, _: &Conditions) -> Option<Hit> {
    (b.packages > 1 && b.bytes > 3_000_000_000).then(|| Hit {
        detail: format!("{} packages, {:.1} GB", b.packages, b.bytes as f64 / 1e9),
        advice: None,
    })
}

pub(super) fn together_m1(b: &BundleFacts, c: &Conditions) -> Option<Hit> {
    let m1 = c.chip.is_some_and(|c| c.mac && c.number == 1);
    (m1 && b.bytes > 3_750_000_000)
        .then(|| Hit { detail: format!("{:.1} GB", b.bytes as f64 / 1e9), advice: None })
}

pub(super) fn programs(b: &BundleFacts, _: &Conditions) -> Option<Hit> {
    (b.packages > 127).then(|| Hit { detail: format!("{} packages", b.packages), advice: None })
}

// Quoted laws that do not hold

pub(super) fn below_14(p: &PackageFacts, _: &Conditions) -> Option<Hit> {
    p.weight_bytes.filter(|&b| (TINY_BYTES + 1..14_000_000).contains(&b)).and_then(|b| Hit::new(size(b)))
}

pub(super) fn below_50(p: &PackageFacts, _: &Conditions) -> Option<Hit> {
    p.weight_bytes.filter(|&b| (14_000_000..50_000_000).contains(&b)).and_then(|b| Hit::new(size(b)))
}

pub(super) fn above_96(p: &PackageFacts, _: &Conditions) -> Option<Hit> {
    p.weight_bytes.filter(|&b| (100_663_297..=262_144_000).contains(&b)).and_then(|b| Hit::new(size(b)))
}

pub(super) fn above_250(p: &PackageFacts, _: &Conditions) -> Option<Hit> {
    p.weight_bytes.filter(|&b| b > 262_144_000 && b <= PROGRAM_BYTES).and_then(|b| Hit::new(size(b)))
}
