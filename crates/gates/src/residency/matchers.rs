//! Conditions of the rules, by the ids of `rules.toml`. Each threshold is stated here once; the rule's evidence names
//! its measurement.

use super::rule::Matcher::{self, Bundle, Graph as Function, Op as EachOp, Otherwise, Package};
use super::rule::{Chip, Conditions, DeviceTarget, Hit, Units};
use crate::program_facts::PackageFacts;
use crate::program_facts::graph::{
    FormClass, Graph, GraphKind, GraphWeight, Op, SMALL_CONSTANT, Shapes, StoredForm,
};
use anemoe_convert::quant::Granularity;
use anemoe_mlpackage::mil::DataType;

/// Deepest sum of products that every chip takes, in terms.
pub const DEPTH: u64 = 16_384;
/// Deepest sum of products that any chip is reported to take, in terms.
pub const DEPTH_NEW: u64 = 65_536;
/// Most bytes of weights that a program can address.
const PROGRAM_BYTES: u64 = 1 << 31;
/// Bytes of a program with a vocabulary head: above the first doubtful, from the second on failed.
const HEAD_BYTES: (u64, u64) = (1_000_000_000, 1_500_000_000);
/// Bytes of a package on an iPhone: above the first doubtful, above the second failed.
const IPHONE_BYTES: (u64, u64) = (950_000_000, 1_400_000_000);
/// Layers of a package on an iPhone: above the first doubtful, from the second on failed.
const IPHONE_LAYERS: (u64, u64) = (15, 35);
/// Bytes of weights up to which all measured graphs were placed on the CPU.
const TINY_BYTES: u64 = 1_000_000;
/// Bytes of the smallest layers that were measured on the ANE, and a third of those with tables.
const LAYER_BYTES: (u64, u64) = (4_000_000, 15_000_000);
/// Bytes below which graphs with scales per block were on the CPU, and above on either side: in INT4, in INT8.
const BLOCK_BYTES: (u64, u64) = (100_000_000, 200_000_000);
/// Bytes of the largest graph that joins shards and was measured on the CPU.
const GLUE_BYTES: u64 = 40_000_000;
/// Positions of a call from which on a graph has the work of a prompt.
pub const MANY_POSITIONS: u64 = 64;
/// Most positions of a call that counts as decoding.
const FEW_POSITIONS: u64 = 8;
/// Sizes of a range: up to the first on the ANE, above the second not on the ANE.
const RANGE: (u64, u64) = (4, 32);
/// Longest axis of a softmax or a search that was seen on the ANE.
const AXIS: u64 = 2048;
/// Slots from which on a separate function for short contexts saves more than a call costs: 8 MB of cache per layer
/// at heads of width 256.
const LONG_CONTEXT: u64 = 1024;
/// Ops that a source counts and does not name, from which on most networks had some of them elsewhere.
const UNNAMED_OPS: u64 = 100;
/// Fewest elements of a last axis by Apple's rule: 64 bytes in fp16.
const LAST_AXIS: u64 = 32;

/// Returns a number of bytes as text, in kB or MB.
pub(super) fn size(bytes: u64) -> String {
    match bytes {
        0..=999_999 => format!("{:.1} kB", bytes as f64 / 1e3),
        _ => format!("{:.1} MB", bytes as f64 / 1e6),
    }
}

/// Returns the condition of the rule with this id.
pub fn of(id: &str) -> Option<Matcher> {
    of_op(id).or_else(|| of_weights(id)).or_else(|| of_function(id)).or_else(|| of_package(id))
}

fn of_op(id: &str) -> Option<Matcher> {
    Some(match id {
        "op.state_update" => EachOp(|op, _, _| when(is_update(op) && updates_state(op))),
        "op.loose_update" => EachOp(|op, _, _| when(is_update(op) && !updates_state(op))),
        "op.cast_integer" => EachOp(cast_integer),
        "op.search_wide" => EachOp(|op, _, _| {
            let n = op.axis_extent.filter(|&n| n > AXIS && searches(op))?;
            Hit::new(format!("{} over {n} elements", op.op_type))
        }),
        "op.search" => EachOp(|op, _, _| {
            let is_short = searches(op) && op.axis_extent.is_none_or(|n| n <= AXIS);
            let over = op.axis_extent.map_or(String::new(), |n| format!(" over {n} elements"));
            is_short.then(|| Hit::new(format!("{}{over}", op.op_type)))?
        }),
        "op.trigonometry_old" => EachOp(|op, _, c| when(has_angles(op) && on(c, |c| !c.trigonometry()))),
        "op.trigonometry_new" => EachOp(|op, _, c| when(has_angles(op) && on(c, Chip::trigonometry))),
        "op.trigonometry" => EachOp(|op, _, c| when(has_angles(op) && c.chip.is_none())),
        "op.activations_iphone" => EachOp(|op, _, c| when(quantizes(op) && is_phone(c))),
        "op.activations" => EachOp(|op, _, c| when(quantizes(op) && !is_phone(c))),
        "op.attention" => EachOp(|op, g, _| {
            when(op.op_type == "scaled_dot_product_attention" && g.kind != GraphKind::Attention)
        }),
        "op.layer_norm" => EachOp(|op, _, _| when(op.op_type == "layer_norm")),
        // Casts at the border of a program are ops of their own, and were seen on the ANE.
        "type.fp32" => EachOp(|op, _, _| {
            let wide = types_of(op, |d| matches!(d, DataType::Float32 | DataType::Float64))?;
            (op.op_type != "cast").then(|| Hit::new(format!("computes in {wide}")))?
        }),
        "type.bf16" => EachOp(|op, _, _| {
            let wanted = |d| matches!(d, DataType::BFloat16 | DataType::Float8E4M3FN | DataType::Float8E5M2);
            Hit::new(format!("computes in {}", types_of(op, wanted)?))
        }),
        "type.integer" => EachOp(|op, _, _| {
            let own = matches!(op.op_type.as_str(), "cast" | "quantize" | "dequantize");
            Hit::new(format!("computes on {}", types_of(op, DataType::is_int).filter(|_| !own)?))
        }),
        "shape.rank" => EachOp(|op, _, _| {
            let rank = op.inputs.iter().chain(&op.outputs).map(|t| t.rank()).max().filter(|&n| n > 5)?;
            Hit::new(format!("rank {rank}"))
        }),
        "shape.rank_2_linear" => EachOp(|op, g, _| {
            let x = op.inputs.first().filter(|x| op.op_type == "linear" && x.rank() == 2)?;
            (!g.kind.is_lone()).then(|| Hit::new(format!("input {x}")))?
        }),
        "shape.batch_over_pixels" => EachOp(|op, _, _| {
            let x = shape(op).filter(|x| op.op_type == "conv" && x.len() == 4 && x[2..] == [1, 1])?;
            let advice = format!("move the batch to the last axis: [1, {}, 1, {}]", x[1], x[0]);
            (x[0] >= MANY_POSITIONS).then(|| Hit::advised(format!("input {x:?}"), advice))?
        }),
        "shape.depth" => EachOp(|op, _, c| too_deep(op).filter(|(k, _)| !takes_depth(c, *k))?.1),
        "shape.depth_new_chip" => EachOp(|op, _, c| too_deep(op).filter(|(k, _)| takes_depth(c, *k))?.1),
        "shape.spatial" => EachOp(|op, _, c| {
            const SPATIAL: [&str; 5] = ["conv", "conv_transpose", "avg_pool", "max_pool", "l2_pool"];
            let limit = if on(c, Chip::wide_extents) { DEPTH_NEW } else { DEPTH };
            let x = shape(op).filter(|_| SPATIAL.contains(&op.op_type.as_str()))?;
            let extent = *x.get(2..)?.iter().max().filter(|&&n| n > limit)?;
            Hit::new(format!("extent {extent}"))
        }),
        "shape.runtime_bound" => EachOp(|op, _, _| {
            let bounds = op.runtime_bounds.join(", ");
            (!bounds.is_empty()).then(|| Hit::new(format!("{bounds} come from data")))?
        }),
        "shape.conv_3d" => EachOp(|op, _, _| {
            let kernel = &op.contraction.as_ref()?.kernel;
            (kernel.len() >= 3).then(|| Hit::new(format!("kernel {kernel:?}")))?
        }),
        "shape.softmax" => EachOp(|op, _, _| {
            let n = op.axis_extent.filter(|&n| op.op_type == "softmax" && n > AXIS)?;
            Hit::new(format!("rows of {n}"))
        }),
        "shape.depthwise_step" => EachOp(|op, _, _| {
            let c = op.contraction.as_ref().filter(|_| is_depthwise(op))?;
            let one_axis = c.kernel.iter().filter(|&&n| n > 1).count() == 1;
            when(one_axis && c.positions.is_some_and(|p| p <= FEW_POSITIONS))
        }),
        "shape.channels_old" => EachOp(|op, _, c| many_channels(op).filter(|_| on(c, Chip::limits_channels))),
        "shape.channels" => EachOp(|op, _, c| many_channels(op).filter(|_| c.chip.is_none())),
        "state.joined_write" => EachOp(|op, _, _| when(op.writes_joined)),
        "value.gelu_m1" => EachOp(|op, _, c| when(op.op_type == "gelu" && is_mac(c, 1))),
        "apple.native_activation" => {
            EachOp(|op, _, _| when(matches!(op.op_type.as_str(), "silu" | "gelu" | "tanh")))
        }
        "apple.heads_together" => EachOp(|op, _, _| {
            let between = op.contraction.as_ref().is_some_and(|c| c.between_activations);
            let x = shape(op).filter(|x| op.op_type == "matmul" && between && x.len() == 4 && x[1] > 1)?;
            let mut shapes = op.inputs.iter().filter_map(|t| t.shape());
            let cached = shapes.any(|s| s.len() == 4 && s[1] > 1 && s[2] >= 32);
            cached.then(|| Hit::new(format!("{} heads in one product", x[1])))?
        }),
        _ => return None,
    })
}

fn of_weights(id: &str) -> Option<Matcher> {
    use StoredForm::{Linear, Lut, Sparse};
    Some(match id {
        "weight.table_two_axes" => EachOp(|op, g, _| {
            weight(op, g, |f| matches!(f, Lut { grouped_axes, .. } if grouped_axes.len() > 1))
        }),
        "weight.table_scaled" => EachOp(|op, g, _| {
            weight(op, g, |f| matches!(f, Lut { scaled: true, entries, .. } if *entries != DataType::Int8))
        }),
        "weight.table_int8" => EachOp(|op, g, _| {
            weight(op, g, |f| matches!(f, Lut { entries: DataType::Int8 | DataType::UInt8, .. }))
        }),
        "weight.table_vector" => {
            EachOp(|op, g, _| weight(op, g, |f| matches!(f, Lut { vector, .. } if *vector > 1)))
        }
        "weight.table_stride" => EachOp(|op, g, _| {
            let stride = op.stride.filter(|&n| op.op_type == "conv" && n > 2)?;
            let hit = weight(op, g, |f| matches!(f, Lut { .. }))?;
            Hit::new(format!("stride {stride}, {}", hit.detail))
        }),
        "weight.depthwise_table" => EachOp(|op, g, _| {
            let table = |i: &usize| matches!(g.weights.get(*i).map(|w| &w.form), Some(Lut { bits: 4, .. }));
            when(is_depthwise(op) && op.weights.iter().any(table))
        }),
        "weight.int4_whole" => EachOp(|op, g, _| {
            let whole = |f: &StoredForm| {
                matches!(f, Linear { bits: 0..=7, grain: Granularity::Tensor | Granularity::Channel })
            };
            weight(op, g, whole)
        }),
        "weight.sparse" => EachOp(|op, g, _| weight(op, g, |f| matches!(f, Sparse))),
        "weight.blocks_small" => Function(|g, _| blocks(g).filter(|b| b.0)?.1),
        "weight.blocks_large" => Function(|g, _| blocks(g).filter(|b| !b.0)?.1),
        _ => return None,
    })
}

fn of_function(id: &str) -> Option<Matcher> {
    Some(match id {
        "state.width" => Function(|g, _| {
            let width = |dims: &[u64]| dims.last().copied().filter(|w| !w.is_multiple_of(32));
            let (s, width) = g.states.iter().find_map(|s| Some((s, width(&s.dims)?)))?;
            let advice = format!("pad the state `{}` to a width of {}", s.name, width.next_multiple_of(32));
            Hit::advised(format!("state `{}` {:?}", s.name, s.dims), advice)
        }),
        "state.two" => Function(|g, _| (g.states.len() == 2).then(|| Hit::new("2 states"))?),
        "state.many" => {
            Function(|g, _| (g.states.len() > 2).then(|| Hit::new(format!("{} states", g.states.len())))?)
        }
        "state.m5" => Function(|g, c| when(!g.states.is_empty() && is_mac(c, 5))),
        "apple.cache_in_graph" => Function(|g, c| {
            let n = Some(g.states.len()).filter(|&n| n > 0 && !is_mac(c, 5))?;
            Hit::new(format!("states in the graph: {n}"))
        }),
        "flexible.enumerated_state" => Function(|g, _| when(is_enumerated(g) && !g.states.is_empty())),
        "flexible.enumerated" => Function(|g, _| when(is_enumerated(g))),
        "flexible.range_wide" => Function(|g, _| range(g, RANGE.1 + 1..=u64::MAX)),
        "flexible.range_middle" => Function(|g, _| range(g, RANGE.0 + 1..=RANGE.1)),
        "flexible.range_tiny" => Function(|g, _| range(g, 0..=RANGE.0)),
        "prefer.layers" => {
            Otherwise(|g, c| when(g.kind == GraphKind::Layers && is_layer(g) && is_plain(g, c)))
        }
        "prefer.head" => Otherwise(|g, c| when(g.kind == GraphKind::Head && is_plain(g, c))),
        "prefer.unnamed_ops" => Otherwise(|g, _| {
            let n = g.op_count.filter(|&n| n >= UNNAMED_OPS && g.has_unnamed_ops())?;
            Hit::new(format!("{n} ops"))
        }),
        "prefer.tiny" => Function(|g, _| {
            let bytes = g.weight_bytes.filter(|&b| b <= TINY_BYTES && !g.weights.is_empty())?;
            let few = g.positions.is_none_or(|p| p < MANY_POSITIONS);
            few.then(|| Hit::new(format!("{} of weights", size(bytes))))?
        }),
        "prefer.trivial" => Function(|g, _| {
            let n = g.op_count.filter(|&n| n <= 8 && is_decoding(g))?;
            let works = |op: &Op| op.contraction.is_some() || op.op_type == "scaled_dot_product_attention";
            let weightless = g.weight_bytes.is_none() || g.weights.is_empty();
            (weightless && !g.ops.iter().any(works)).then(|| Hit::new(format!("{n} ops")))?
        }),
        "prefer.glue" => Function(|g, _| {
            let small = g.weight_bytes.is_none_or(|b| b <= GLUE_BYTES);
            let products = g.matrices().count();
            (g.kind == GraphKind::Glue && small)
                .then(|| Hit::new(format!("{} ops around {products} products", g.at_least_ops())))?
        }),
        "prefer.gpu_decodes" => {
            Function(|g, c| when(g.kind == GraphKind::Layers && g.is_fp16() && is_lost_to_gpu(g, c)))
        }
        "prefer.gpu_large" => Function(|g, c| {
            let bytes = g.weight_bytes.filter(|&b| c.units == Units::All && b >= HEAD_BYTES.0)?;
            Hit::new(size(bytes))
        }),
        "value.beyond_fp16" => Function(|g, _| Hit::new(format!("`{}`", g.beyond_fp16.as_ref()?))),
        "apple.one_position_last" => Function(|g, _| {
            let found = g.borders.iter().find(|(_, dims)| dims.len() == 4 && dims[3] == 1)?;
            Hit::new(format!("`{}` {:?}", found.0, found.1))
        }),
        "apple.uneven_last_axis" => Function(|g, _| uneven_last_axis(g)),
        // `abs`, then `reduce_max`: a norm that divides by the largest magnitude. A router has them the other way round.
        "apple.scaled_norm" => Function(|g, _| {
            let mut pairs = g.ops.windows(2);
            let largest = pairs.any(|pair| pair[0].op_type == "abs" && pair[1].op_type == "reduce_max");
            when(largest && g.ops.iter().any(|op| op.op_type == "rsqrt"))
        }),
        "apple.one_layer" => {
            Function(|g, _| when(g.layers == Some(1) && g.kind == GraphKind::Layers && !g.vocabulary_head))
        }
        _ => return None,
    })
}

fn of_package(id: &str) -> Option<Matcher> {
    Some(match id {
        "prefer.mixed_functions" => Package(|p, c| mixed(p).filter(|_| c.units == Units::CpuAndNe)),
        "prefer.mixed_functions_gpu" => Package(|p, c| mixed(p).filter(|_| c.units == Units::All)),
        "load.program_size" => Package(|p, _| {
            let bytes = p.weight_bytes.filter(|&b| b > PROGRAM_BYTES)?;
            Hit::advised(size(bytes), split(bytes, PROGRAM_BYTES))
        }),
        "load.head" => Package(|p, _| {
            Hit::new(size(with_head(p).filter(|b| (HEAD_BYTES.1..=PROGRAM_BYTES).contains(b))?))
        }),
        "load.head_risk" => {
            Package(|p, _| Hit::new(size(with_head(p).filter(|&b| b > HEAD_BYTES.0 && b < HEAD_BYTES.1)?)))
        }
        "load.iphone_size" => Package(|p, c| {
            let bytes = p.weight_bytes.filter(|&b| is_phone(c) && b > IPHONE_BYTES.1)?;
            Hit::advised(size(bytes), split(bytes, IPHONE_BYTES.0))
        }),
        "load.iphone_margin" => Package(|p, c| {
            let near = |b: &u64| *b > IPHONE_BYTES.0 && *b <= IPHONE_BYTES.1;
            let bytes = p.weight_bytes.filter(|b| is_phone(c) && near(b))?;
            Hit::advised(size(bytes), split(bytes, IPHONE_BYTES.0))
        }),
        "load.iphone_states" => Package(|p, c| {
            let dual = |g: &Graph| g.states.len() > 1 && g.positions.is_some_and(|n| n > 1);
            when(is_phone(c) && p.graphs.len() > 1 && p.graphs.iter().any(dual))
        }),
        "load.iphone_layers" => Package(|p, c| {
            let n = most_layers(p, c).filter(|n| (IPHONE_LAYERS.0 + 1..IPHONE_LAYERS.1).contains(n))?;
            Hit::new(format!("{n} layers"))
        }),
        "load.iphone_merged" => Package(|p, c| {
            Hit::new(format!("{} layers", most_layers(p, c).filter(|&n| n >= IPHONE_LAYERS.1)?))
        }),
        "load.together" => Bundle(|b, _| {
            let large = b.packages > 1 && b.bytes > 3_000_000_000;
            large.then(|| Hit::new(format!("{} packages, {:.1} GB", b.packages, b.bytes as f64 / 1e9)))?
        }),
        "apple.prompts_by_token" => Bundle(|b, _| when(b.most_tokens == Some(1))),
        "apple.long_context" => Package(|p, _| {
            let rows = |g: &Graph| {
                g.ops.iter().filter(|op| op.op_type == "softmax").filter_map(|op| op.axis_extent).max()
            };
            let slots: Vec<u64> = p.graphs.iter().filter_map(rows).collect();
            let longest = slots.iter().copied().max().filter(|&n| n >= LONG_CONTEXT)?;
            let alike = slots.iter().all(|&n| n == longest);
            alike.then(|| Hit::new(format!("{longest} slots in every call")))?
        }),
        "apple.shared_functions" => Package(|p, _| {
            let stateful = p.graphs.iter().filter(|g| !g.states.is_empty()).count();
            (stateful > 1).then(|| Hit::new(format!("{stateful} functions over states")))?
        }),
        _ => return None,
    })
}

fn when(condition: bool) -> Option<Hit> {
    condition.then(Hit::default)
}

fn on(c: &Conditions, test: fn(Chip) -> bool) -> bool {
    c.chip.is_some_and(test)
}

fn is_mac(c: &Conditions, number: u32) -> bool {
    c.chip.is_some_and(|chip| chip.mac && chip.number == number)
}

fn is_phone(c: &Conditions) -> bool {
    c.target == DeviceTarget::Iphone
}

fn shape(op: &Op) -> Option<Vec<u64>> {
    op.inputs.first()?.shape()
}

fn types_of(op: &Op, wanted: impl Fn(DataType) -> bool) -> Option<DataType> {
    op.inputs.iter().chain(&op.outputs).map(|t| t.dtype).find(|&d| wanted(d))
}

fn is_update(op: &Op) -> bool {
    op.op_type == "slice_update"
}

/// Tells whether an update is of a state. In a summary, which does not list operands, it is.
fn updates_state(op: &Op) -> bool {
    op.updates_state || op.inputs.is_empty()
}

fn searches(op: &Op) -> bool {
    matches!(op.op_type.as_str(), "topk" | "reduce_argmax" | "reduce_argmin")
}

fn has_angles(op: &Op) -> bool {
    matches!(op.op_type.as_str(), "sin" | "cos")
}

fn quantizes(op: &Op) -> bool {
    matches!(op.op_type.as_str(), "quantize" | "dequantize")
}

fn is_depthwise(op: &Op) -> bool {
    op.contraction.as_ref().is_some_and(|c| c.groups > 1 && c.depth == Some(1))
}

fn cast_integer(op: &Op, g: &Graph, _: &Conditions) -> Option<Hit> {
    if op.op_type != "cast" {
        return None;
    }
    if op.inputs.is_empty() && op.outputs.is_empty() {
        // In a summary, a cast beside a search for the largest elements can only be a cast of indices.
        let indices = g.ops.iter().any(|o| searches(o) || o.op_type == "argsort");
        return indices.then(|| Hit::new("casts indices"))?;
    }
    Hit::new(format!("casts from or to {}", types_of(op, DataType::is_int)?))
}

fn too_deep(op: &Op) -> Option<(u64, Option<Hit>)> {
    let k = op.contraction.as_ref()?.depth.filter(|&k| k > DEPTH)?;
    let advice = format!("cut the {k} inputs into {} and add the results", k.div_ceil(DEPTH));
    Some((k, Hit::advised(format!("depth {k}"), advice)))
}

fn takes_depth(c: &Conditions, k: u64) -> bool {
    on(c, Chip::wide_extents) && k <= DEPTH_NEW
}

fn many_channels(op: &Op) -> Option<Hit> {
    let n = op.contraction.as_ref()?.outputs.filter(|&n| op.op_type == "conv" && n > DEPTH_NEW)?;
    let advice = format!("cut the outputs in {} parts", n.div_ceil(DEPTH_NEW));
    Hit::advised(format!("{n} output channels"), advice)
}

fn weight(op: &Op, g: &Graph, wanted: fn(&StoredForm) -> bool) -> Option<Hit> {
    let matters = |w: &&GraphWeight| {
        let compressed = matches!(w.form, StoredForm::Lut { .. } | StoredForm::Linear { .. });
        (compressed || w.bytes >= SMALL_CONSTANT) && wanted(&w.form)
    };
    let w = op.weights.iter().filter_map(|&i| g.weights.get(i)).find(matters)?;
    Hit::new(format!("weight `{}` {:?}: {}", w.name, w.dims, w.form.describe()))
}

/// Returns whether a graph with scales per block is small. All ops of a small graph leave the ANE with its blocks, so
/// the bytes of the whole graph count.
fn blocks(g: &Graph) -> Option<(bool, Option<Hit>)> {
    let bits = g.weights.iter().filter_map(|w| match w.form {
        StoredForm::Linear { bits, grain: Granularity::Block } => Some(bits),
        _ => None,
    });
    let (bits, bytes) = (bits.min()?, g.weight_bytes.unwrap_or(0));
    let limit = if bits <= 4 { BLOCK_BYTES.0 } else { BLOCK_BYTES.1 };
    Some((bytes < limit, Hit::new(format!("int{bits} per block, {}", size(bytes)))))
}

fn is_enumerated(g: &Graph) -> bool {
    g.shapes == Shapes::Enumerated
}

/// Matches a range of so many sizes; without an upper bound, as many as there are numbers.
fn range(g: &Graph, sizes: std::ops::RangeInclusive<u64>) -> Option<Hit> {
    let Shapes::Ranged(bound) = g.shapes else { return None };
    let detail = bound.map_or("no upper bound".into(), |b| format!("{b} sizes"));
    sizes.contains(&bound.unwrap_or(u64::MAX)).then(|| Hit::new(detail))?
}

/// Tells whether the weights have a known size in forms that were seen on the ANE, and the GPU does not win.
fn is_plain(g: &Graph, c: &Conditions) -> bool {
    let seen = |w: &GraphWeight| {
        w.form.class().is_some_and(|class| class != FormClass::Other || w.bytes < SMALL_CONSTANT)
    };
    let known = g.weight_bytes.is_some() && !g.has_unnamed_ops();
    known && g.weights.iter().all(seen) && !is_lost_to_gpu(g, c)
}

/// Tells whether a graph has the size of measured layers.
fn is_layer(g: &Graph) -> bool {
    let least = if g.form() == Some(FormClass::Tables) { LAYER_BYTES.1 } else { LAYER_BYTES.0 };
    g.weight_bytes >= Some(least)
}

fn is_decoding(g: &Graph) -> bool {
    g.positions.is_none_or(|p| p <= FEW_POSITIONS)
}

fn is_lost_to_gpu(g: &Graph, c: &Conditions) -> bool {
    c.units == Units::All && is_decoding(g)
}

/// Matches a value with tokens on its last axis, of which there are several, fewer than 32 or no power of two, at the
/// border of the function. Other widths are the model's, and no form changes them.
fn uneven_last_axis(g: &Graph) -> Option<Hit> {
    let uneven = |n: u64| n > 1 && (n < LAST_AXIS || !n.is_power_of_two());
    let tokens_last = |dims: &[u64]| dims.len() == 4 && dims[1] > 1 && uneven(dims[3]);
    let (name, dims) = g.borders.iter().find(|(_, dims)| tokens_last(dims))?;
    Hit::new(format!("`{name}` {dims:?}"))
}

fn mixed(p: &PackageFacts) -> Option<Hit> {
    let positions = || p.graphs.iter().filter_map(|g| g.positions);
    let (low, high) = (positions().min()?, positions().max()?);
    (p.graphs.len() > 1 && low <= FEW_POSITIONS && high >= MANY_POSITIONS)
        .then(|| Hit::new(format!("functions for {low} and for {high} positions")))?
}

fn split(bytes: u64, limit: u64) -> String {
    format!("split the package in {}", bytes.div_ceil(limit))
}

/// Returns the bytes of a package that holds layers and a vocabulary head.
fn with_head(p: &PackageFacts) -> Option<u64> {
    let stack = |g: &Graph| g.vocabulary_head && matches!(g.kind, GraphKind::Layers | GraphKind::Unstated);
    p.weight_bytes.filter(|_| p.graphs.iter().any(stack))
}

fn most_layers(p: &PackageFacts, c: &Conditions) -> Option<u64> {
    p.graphs.iter().filter_map(|g| g.layers).max().filter(|_| is_phone(c))
}
