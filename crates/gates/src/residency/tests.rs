//! Tests each rule where it applies and where it does not, and whole programs.

use super::graph::{Contraction, Graph, GraphState, GraphWeight, Op, Shapes, StoredForm};
use super::rule::{
    BundleFacts, Chip, Conditions, DeviceTarget, Matcher, PackageFacts, RuleSeverity, SystemRelease, Units,
    Verdict,
};
use super::verdict::{IMPROBABLE, Judge, LIKELY, NO_SIGHTING, PackageReport, UNDECIDED};
use super::{facts, rules};
use anemoe_convert::quant::Granularity;
use anemoe_mlpackage::mil::builder::{ConvParams, FunctionBuilder, SliceParams, model};
use anemoe_mlpackage::mil::{DataType, MlModel, Opset, TensorType, Value};
use std::collections::BTreeSet;

const F16: DataType = DataType::Float16;

fn mac() -> Conditions {
    Conditions::default()
}

fn phone() -> Conditions {
    Conditions { target: DeviceTarget::Iphone, ..mac() }
}

fn all_units() -> Conditions {
    Conditions { units: Units::All, ..mac() }
}

fn on(chip: &str) -> Conditions {
    Conditions { chip: Chip::parse(chip), ..mac() }
}

fn op(op_type: &str, dims: &[u64]) -> Op {
    let ty = TensorType::fixed(F16, dims);
    Op {
        name: "o".into(),
        op_type: op_type.into(),
        inputs: vec![ty.clone()],
        outputs: vec![ty],
        ..Op::default()
    }
}

fn typed(op_type: &str, dtype: DataType) -> Op {
    let ty = TensorType::fixed(dtype, &[1, 64]);
    Op { inputs: vec![ty.clone()], outputs: vec![ty], ..op(op_type, &[]) }
}

/// Makes a package of one op in a graph that is otherwise predicted on the ANE.
fn with(op: Op) -> PackageFacts {
    let mut p = layers(100_000_000);
    p.graphs[0].ops.push(op);
    p
}

fn product(op_type: &str, depth: u64) -> Op {
    let contraction = Contraction {
        depth: Some(depth),
        outputs: Some(512),
        positions: Some(1),
        groups: 1,
        ..Contraction::default()
    };
    Op { contraction: Some(contraction), weights: vec![0], ..op(op_type, &[1, depth, 1, 1]) }
}

fn kernel(kernel: &[u64], groups: u64, depth: u64) -> Op {
    let mut o = product("conv", depth);
    let c = o.contraction.as_mut().unwrap();
    (c.kernel, c.groups) = (kernel.to_vec(), groups);
    o
}

fn extent(op_type: &str, n: u64) -> Op {
    Op { axis_extent: Some(n), ..op(op_type, &[1, 4, n]) }
}

fn stored(form: StoredForm, bytes: u64) -> GraphWeight {
    GraphWeight { name: "w".into(), dims: vec![512, 512], form, bytes }
}

/// Makes a package of 12 ops with two products, stored as fp16.
fn layers(bytes: u64) -> PackageFacts {
    layers_of(StoredForm::Dense(F16), bytes)
}

fn layers_of(form: StoredForm, bytes: u64) -> PackageFacts {
    let mut ops = vec![product("conv", 512), product("conv", 512)];
    ops.extend((0..10).map(|_| op("mul", &[1, 512, 1, 1])));
    let g = Graph {
        function: "main".into(),
        op_count: None,
        ops,
        matrix_count: Some(2),
        weights: vec![stored(form, bytes)],
        weight_bytes: Some(bytes),
        positions: Some(1),
        ..Graph::default()
    };
    PackageFacts { weight_bytes: Some(bytes), graphs: vec![g] }
}

fn changed(mut p: PackageFacts, change: impl Fn(&mut Graph)) -> PackageFacts {
    p.graphs.iter_mut().for_each(change);
    p
}

fn few(op_type: &str, depths: &[u64], form: StoredForm, bytes: u64) -> PackageFacts {
    changed(layers_of(form, bytes), |g| {
        g.ops = depths.iter().map(|&k| product(op_type, k)).collect();
        g.matrix_count = Some(depths.len() as u64);
    })
}

fn states(widths: &[u64]) -> PackageFacts {
    changed(layers(100_000_000), |g| {
        g.states = widths.iter().map(|&w| GraphState { name: "s".into(), dims: vec![1, 4, 64, w] }).collect();
    })
}

fn ranged(shapes: Shapes) -> PackageFacts {
    changed(layers(100_000_000), |g| g.shapes = shapes)
}

fn weight(form: StoredForm) -> PackageFacts {
    layers_of(form, 300_000_000)
}

fn lut(grouped_axes: &[usize], entries: DataType, vector: u64, scaled: bool) -> StoredForm {
    StoredForm::Lut { bits: 4, grouped_axes: grouped_axes.to_vec(), entries, vector, scaled }
}

fn lin(bits: u64, grain: Granularity) -> StoredForm {
    StoredForm::Linear { bits, grain }
}

fn between(m: u64) -> PackageFacts {
    changed(layers(0), |g| {
        let mut o = product("matmul", m);
        let c = o.contraction.as_mut().unwrap();
        (c.outputs, c.positions, c.between_activations) = (Some(m), Some(m), true);
        o.weights.clear();
        (g.ops, g.weights, g.matrix_count) = (vec![o], vec![], Some(0));
    })
}

fn attention(n: u64) -> PackageFacts {
    changed(between(8), |g| g.ops = vec![op("scaled_dot_product_attention", &[1, 1, n, 64])])
}

fn functions(n: usize, positions: &[u64], p: PackageFacts) -> PackageFacts {
    let graphs = (0..n)
        .map(|i| Graph {
            function: format!("f{i}"),
            positions: Some(positions[i % positions.len()]),
            ..p.graphs[0].clone()
        })
        .collect();
    PackageFacts { graphs, ..p }
}

fn check(p: &PackageFacts, c: Conditions) -> PackageReport {
    Judge::new(c).package("p", p, true)
}

/// Returns the ids of all rules that apply.
fn rules(r: &PackageReport) -> BTreeSet<&'static str> {
    let said = r.reasons.iter().chain(&r.warnings).map(|r| r.rule);
    let functions = r
        .functions
        .iter()
        .flat_map(|f| f.support.into_iter().chain(f.op_list.iter().flat_map(|o| o.rules.clone())));
    said.chain(functions).collect()
}

type Case = (&'static str, PackageFacts, Conditions, bool);

/// Returns cases of rules about more than op types, each with and without a match. Rules about op types follow from
/// the table.
fn cases() -> Vec<Case> {
    let int32 = DataType::Int32;
    let mut update = op("slice_update", &[1, 64]);
    update.updates_state = true;
    let mut runtime = op("slice_by_index", &[1, 64]);
    runtime.runtime_bounds = vec!["begin".into()];
    let mut pool = op("max_pool", &[1, 4, 64, 64]);
    pool.window = Some(14);
    let mut step = kernel(&[1, 3], 64, 1);
    let mut long = step.clone();
    step.contraction.as_mut().unwrap().positions = Some(1);
    long.contraction.as_mut().unwrap().positions = Some(188);
    let two_counts = || functions(2, &[1, 64], layers(100_000_000));
    let one_count = || functions(2, &[1, 4], layers(100_000_000));
    let sized = |bytes: u64| layers(bytes);
    let headed = |bytes: u64| changed(layers(bytes), |g| g.vocabulary_head = true);
    let stack = |n: u64| changed(layers(500_000_000), |g| g.layers = Some(n));
    let dual = |positions: &[u64]| functions(2, positions, states(&[64, 64]));
    let glue = |bytes: u64| changed(layers(bytes), |g| g.glue = true);
    let tokens = |n: u64, bytes: u64| changed(layers(bytes), |g| g.positions = Some(n));
    let trivial = |n: u64| {
        changed(layers(1), |g| {
            (g.weight_bytes, g.op_count, g.weights) = (None, Some(n), vec![]);
            g.ops = vec![op("mul", &[1, 64])];
        })
    };
    let dense = || StoredForm::Dense(F16);
    let wide = || {
        let mut o = product("conv", 512);
        o.contraction.as_mut().unwrap().outputs = Some(87_424);
        with(o)
    };
    let joined = |pieces: u64| with(Op { later_pieces: pieces, ..op("concat", &[1, 4, 1, 128]) });
    let strided = |stride: u64| changed(weight(lut(&[0], F16, 1, false)), |g| g.ops[0].stride = Some(stride));
    let heads = |n: u64| {
        let mut o = op("matmul", &[1, n, 4, 256]);
        o.inputs.push(TensorType::fixed(F16, &[1, n, 2048, 256]));
        o.contraction = Some(Contraction { between_activations: true, ..Contraction::default() });
        with(o)
    };
    let scaled = |name: &str| {
        changed(layers(100_000_000), |g| g.ops.extend([name, "reduce_max", "rsqrt"].map(|n| op(n, &[1, 64]))))
    };
    let router =
        ["reduce_max", "sub", "abs", "maximum", "mul", "reduce_mean", "rsqrt"].map(|n| op(n, &[1, 64]));
    let router_and_norm = changed(layers(100_000_000), |g| g.ops.extend(router.clone()));
    let bordered =
        |dims: &[u64]| changed(layers(100_000_000), |g| g.borders = vec![("hidden".into(), dims.to_vec())]);
    let contexts = |slots: &[u64]| {
        let graphs: Vec<Graph> = slots.iter().flat_map(|&n| with(extent("softmax", n)).graphs).collect();
        PackageFacts { graphs, ..layers(100_000_000) }
    };
    let written = |joined: bool| with(Op { writes_joined: joined, ..op("write_state", &[1, 64]) });
    let int8 = || lin(8, Granularity::Tensor);
    vec![
        ("op.state_update", with(update.clone()), mac(), true),
        ("op.state_update", with(op("slice_update", &[1, 64])), mac(), false),
        ("op.loose_update", with(op("slice_update", &[1, 64])), mac(), true),
        ("op.loose_update", with(update), mac(), false),
        ("op.cast_integer", with(typed("cast", int32)), mac(), true),
        ("op.cast_integer", with(typed("cast", DataType::Float32)), mac(), false),
        ("op.search_wide", with(extent("topk", 50_000)), mac(), true),
        ("op.search_wide", with(extent("topk", 128)), mac(), false),
        ("op.search", with(extent("topk", 128)), mac(), true),
        ("op.search", with(extent("reduce_argmax", 50_000)), mac(), false),
        ("op.trigonometry_old", with(op("sin", &[1, 64])), on("m2"), true),
        ("op.trigonometry_old", with(op("sin", &[1, 64])), on("m3"), false),
        ("op.trigonometry", with(op("cos", &[1, 64])), mac(), true),
        ("op.trigonometry", with(op("cos", &[1, 64])), on("a17"), false),
        ("op.trigonometry_new", with(op("cos", &[1, 64])), on("M4 Max"), true),
        ("op.trigonometry_new", with(op("cos", &[1, 64])), on("a14"), false),
        ("op.activations_iphone", with(op("quantize", &[1, 64])), phone(), true),
        ("op.activations_iphone", with(op("quantize", &[1, 64])), mac(), false),
        ("op.activations", with(op("dequantize", &[1, 64])), mac(), true),
        ("op.activations", with(op("mul", &[1, 64])), mac(), false),
        ("op.attention", with(op("scaled_dot_product_attention", &[1, 8, 64, 64])), mac(), true),
        ("op.attention", attention(1 << 16), mac(), false),
        ("op.layer_norm", with(op("layer_norm", &[1, 64])), mac(), true),
        ("op.layer_norm", with(op("mul", &[1, 64])), mac(), false),
        ("type.fp32", with(typed("mul", DataType::Float32)), mac(), true),
        ("type.fp32", with(typed("cast", DataType::Float32)), mac(), false),
        ("type.bf16", with(typed("mul", DataType::BFloat16)), mac(), true),
        ("type.bf16", with(typed("mul", F16)), mac(), false),
        ("type.integer", with(typed("equal", int32)), mac(), true),
        ("type.integer", with(typed("equal", F16)), mac(), false),
        ("shape.rank", with(op("mul", &[1; 6])), mac(), true),
        ("shape.rank", with(op("mul", &[1; 5])), mac(), false),
        ("shape.rank_2_linear", with(op("linear", &[1, 512])), mac(), true),
        ("shape.rank_2_linear", with(op("linear", &[1, 1, 512])), mac(), false),
        ("shape.batch_over_pixels", with(op("conv", &[64, 640, 1, 1])), mac(), true),
        ("shape.batch_over_pixels", with(op("conv", &[1, 640, 1, 64])), mac(), false),
        ("shape.last_axis", with(op("matmul", &[1, 8, 32_768, 1])), mac(), true),
        ("shape.last_axis", with(op("matmul", &[1, 8, 1, 32_768])), mac(), false),
        ("shape.depth", with(product("conv", 16_385)), mac(), true),
        ("shape.depth", with(product("conv", 16_384)), mac(), false),
        ("shape.depth_new_chip", with(product("conv", 17_408)), on("m5"), true),
        ("shape.depth_new_chip", with(product("conv", 17_408)), on("m3"), false),
        ("shape.spatial", with(op("conv", &[1, 3, 1, 20_000])), mac(), true),
        ("shape.spatial", with(op("conv", &[1, 3, 1, 20_000])), on("m4"), false),
        ("shape.image", with(op("conv", &[1, 3, 5568, 5568])), mac(), true),
        ("shape.image", with(op("conv", &[1, 3, 224, 224])), mac(), false),
        ("shape.runtime_bound", with(runtime), mac(), true),
        ("shape.runtime_bound", with(op("slice_by_index", &[1, 64])), mac(), false),
        ("shape.conv_3d", with(kernel(&[3, 3, 3], 1, 16)), mac(), true),
        ("shape.conv_3d", with(kernel(&[3, 3], 1, 16)), mac(), false),
        ("shape.window", with(pool), mac(), true),
        ("shape.window", with(kernel(&[13, 13], 1, 16)), mac(), false),
        ("shape.softmax", with(extent("softmax", 4096)), mac(), true),
        ("shape.softmax", with(extent("softmax", 2048)), mac(), false),
        ("shape.depthwise_step", with(step), mac(), true),
        ("shape.depthwise_step", with(long), mac(), false),
        ("state.width", states(&[270]), mac(), true),
        ("state.width", states(&[256]), mac(), false),
        ("state.two", states(&[64, 64]), mac(), true),
        ("state.two", states(&[64]), mac(), false),
        ("state.many", states(&[64, 64, 64]), mac(), true),
        ("state.many", states(&[64, 64]), mac(), false),
        ("flexible.enumerated_state", changed(states(&[64]), |g| g.shapes = Shapes::Enumerated), mac(), true),
        ("flexible.enumerated_state", ranged(Shapes::Enumerated), mac(), false),
        (
            "flexible.enumerated_norm",
            changed(with(op("layer_norm", &[1, 64])), |g| g.shapes = Shapes::Enumerated),
            mac(),
            true,
        ),
        ("flexible.enumerated_norm", ranged(Shapes::Enumerated), mac(), false),
        ("flexible.enumerated", ranged(Shapes::Enumerated), mac(), true),
        ("flexible.enumerated", ranged(Shapes::Fixed), mac(), false),
        ("flexible.range_wide", ranged(Shapes::Ranged(None)), mac(), true),
        ("flexible.range_wide", ranged(Shapes::Ranged(Some(8))), mac(), false),
        ("flexible.range_middle", ranged(Shapes::Ranged(Some(8))), mac(), true),
        ("flexible.range_middle", ranged(Shapes::Ranged(Some(4))), mac(), false),
        ("flexible.range_tiny", ranged(Shapes::Ranged(Some(4))), mac(), true),
        ("flexible.range_tiny", ranged(Shapes::Ranged(Some(512))), mac(), false),
        ("weight.table_two_axes", weight(lut(&[0, 1], F16, 1, false)), mac(), true),
        ("weight.table_two_axes", weight(lut(&[0], F16, 1, false)), mac(), false),
        ("weight.table_scaled", weight(lut(&[0], F16, 1, true)), mac(), true),
        ("weight.table_scaled", weight(lut(&[], F16, 1, false)), mac(), false),
        ("weight.table_int8", weight(lut(&[], DataType::Int8, 1, false)), mac(), true),
        ("weight.table_int8", weight(lut(&[], F16, 1, false)), mac(), false),
        ("weight.table_vector", weight(lut(&[0], F16, 2, false)), mac(), true),
        ("weight.table_vector", weight(lut(&[0], F16, 1, false)), mac(), false),
        (
            "weight.depthwise_table",
            changed(weight(lut(&[0], F16, 1, false)), |g| g.ops.push(kernel(&[3], 512, 1))),
            mac(),
            true,
        ),
        ("weight.depthwise_table", with(kernel(&[3], 512, 1)), mac(), false),
        ("weight.blocks_small", layers_of(lin(4, Granularity::Block), 90_000_000), mac(), true),
        ("weight.blocks_small", layers_of(lin(4, Granularity::Block), 205_000_000), mac(), false),
        ("weight.blocks_large", layers_of(lin(4, Granularity::Block), 205_000_000), mac(), true),
        ("weight.blocks_large", layers_of(int8(), 205_000_000), mac(), false),
        ("weight.int4_whole", weight(lin(4, Granularity::Channel)), mac(), true),
        ("weight.int4_whole", weight(lin(8, Granularity::Channel)), mac(), false),
        ("weight.sparse", weight(StoredForm::Sparse), mac(), true),
        ("weight.sparse", weight(dense()), mac(), false),
        ("weight.unstated", weight(StoredForm::Unstated), mac(), true),
        ("weight.unstated", weight(dense()), mac(), false),
        ("prefer.layer_graph", layers_of(int8(), 5_300_000), mac(), true),
        ("prefer.layer_graph", layers_of(lut(&[0], F16, 1, false), 5_300_000), mac(), false),
        ("prefer.size_disputed", layers_of(int8(), 381_700_000), mac(), true),
        ("prefer.size_disputed", layers_of(int8(), 363_000_000), mac(), false),
        (
            "prefer.size_disputed",
            changed(states(&[64]), |g| g.weight_bytes = Some(385_000_000)),
            mac(),
            false,
        ),
        ("prefer.beyond_measured", sized(726 << 20), mac(), true),
        ("prefer.beyond_measured", sized(450_000_000), mac(), false),
        ("prefer.beyond_measured", layers_of(lut(&[0], F16, 1, false), 203_000_000), mac(), true),
        ("prefer.beyond_measured", layers_of(lut(&[0], F16, 1, false), 202_000_000), mac(), false),
        ("prefer.beyond_measured", few("conv", &[2048, 2048], dense(), 255_000_000), mac(), true),
        ("prefer.beyond_measured", few("conv", &[2048, 2048], dense(), 254_000_000), mac(), false),
        ("prefer.many_positions", tokens(64, 4_700_000), mac(), true),
        ("prefer.many_positions", tokens(4, 4_700_000), mac(), false),
        ("prefer.lone_deep", few("linear", &[5120], dense(), 52_000_000), mac(), true),
        ("prefer.lone_deep", few("linear", &[4900], dense(), 52_000_000), mac(), false),
        ("prefer.lone_deep", few("conv", &[3072], int8(), 154_000_000), mac(), true),
        ("prefer.lone_deep", few("linear", &[3072], int8(), 154_000_000), mac(), false),
        ("prefer.lone_shallow", few("linear", &[4864], dense(), 49_000_000), mac(), true),
        ("prefer.lone_shallow", few("linear", &[4900], dense(), 49_000_000), mac(), false),
        ("prefer.product_small", between(384), mac(), true),
        ("prefer.product_small", between(448), mac(), false),
        ("prefer.product_large", between(512), mac(), true),
        ("prefer.product_large", between(448), mac(), false),
        ("prefer.few_small", few("conv", &[1024, 1024, 4096], dense(), 25_000_000), mac(), true),
        ("prefer.few_small", few("conv", &[1024, 1024, 4096], dense(), 40_000_000), mac(), false),
        ("prefer.few_large", few("conv", &[2048, 2048, 4096], dense(), 50_300_000), mac(), true),
        ("prefer.few_large", few("conv", &[2048, 2048, 4096], int8(), 50_300_000), mac(), false),
        ("prefer.few_int8_convs", few("conv", &[2048, 1024], int8(), 4_000_000), mac(), true),
        ("prefer.few_int8_convs", few("linear", &[2048, 1024], int8(), 4_000_000), mac(), false),
        ("prefer.attention_small", attention(1 << 14), mac(), true),
        ("prefer.attention_small", attention((1 << 14) + 64), mac(), false),
        ("prefer.attention_large", attention(1 << 15), mac(), true),
        ("prefer.attention_large", attention((1 << 15) - 64), mac(), false),
        ("prefer.tiny", sized(200_000), mac(), true),
        ("prefer.tiny", tokens(64, 200_000), mac(), false),
        ("prefer.trivial", trivial(8), mac(), true),
        ("prefer.trivial", trivial(9), mac(), false),
        ("prefer.glue", glue(27_000_000), mac(), true),
        ("prefer.glue", sized(27_000_000), mac(), false),
        ("prefer.gpu_decodes", sized(100_000_000), all_units(), true),
        ("prefer.gpu_decodes", tokens(64, 100_000_000), all_units(), false),
        ("prefer.gpu_large", tokens(64, 1_200_000_000), all_units(), true),
        ("prefer.gpu_large", tokens(64, 1_200_000_000), mac(), false),
        ("prefer.gpu_int8", weight(int8()), all_units(), true),
        ("prefer.gpu_int8", weight(int8()), mac(), false),
        ("prefer.mixed_functions_gpu", two_counts(), all_units(), true),
        ("prefer.mixed_functions_gpu", one_count(), all_units(), false),
        ("prefer.mixed_functions", two_counts(), mac(), true),
        ("prefer.mixed_functions", one_count(), mac(), false),
        ("load.program_size", sized((1 << 31) + 1), mac(), true),
        ("load.program_size", sized(1 << 31), mac(), false),
        ("load.head", headed(1_500_000_000), mac(), true),
        ("load.head", sized(1_900_000_000), mac(), false),
        ("load.head_risk", headed(1_200_000_000), mac(), true),
        ("load.head_risk", headed(828_000_000), mac(), false),
        ("load.iphone_size", sized(1_880_000_000), phone(), true),
        ("load.iphone_size", sized(1_880_000_000), mac(), false),
        ("load.iphone_margin", sized(1_100_000_000), phone(), true),
        ("load.iphone_margin", sized(950_000_000), phone(), false),
        ("load.iphone_states", dual(&[1, 4]), phone(), true),
        ("load.iphone_states", dual(&[1, 1]), phone(), false),
        ("load.iphone_layers", stack(20), phone(), true),
        ("load.iphone_layers", stack(15), phone(), false),
        ("load.iphone_merged", stack(35), phone(), true),
        ("load.iphone_merged", stack(35), mac(), false),
        ("load.functions", functions(257, &[1], layers(9_000_000)), mac(), true),
        ("load.functions", functions(256, &[1], layers(9_000_000)), mac(), false),
        ("prefer.below_measured", layers_of(lut(&[0], F16, 1, false), 14_000_000), mac(), true),
        ("prefer.below_measured", layers_of(lut(&[0], F16, 1, false), 16_000_000), mac(), false),
        ("shape.channels_old", wide(), on("m3"), true),
        ("shape.channels_old", wide(), on("m4"), false),
        ("shape.channels", wide(), mac(), true),
        ("shape.channels", wide(), on("m3"), false),
        ("value.joined_pieces", joined(2), on("m2"), true),
        ("value.joined_pieces", joined(1), on("m2"), false),
        ("value.joined_pieces_old", joined(2), mac(), true),
        ("value.joined_pieces_old", joined(2), on("m4"), false),
        ("weight.table_stride", strided(3), mac(), true),
        ("weight.table_stride", strided(2), mac(), false),
        ("state.joined_write", written(true), mac(), true),
        ("state.joined_write", written(false), mac(), false),
        ("state.m5", states(&[64]), on("m5"), true),
        ("state.m5", states(&[64]), on("m4"), false),
        ("apple.cache_in_graph", states(&[64]), mac(), true),
        ("apple.cache_in_graph", layers(100_000_000), mac(), false),
        ("apple.one_position_last", bordered(&[1, 64, 1, 1]), mac(), true),
        // The place of one token in a cache.
        ("apple.one_position_last", bordered(&[1, 1, 64, 1]), mac(), true),
        // Channels on the last axis; the layout inside a function is free.
        ("apple.one_position_last", bordered(&[1, 1, 1, 64]), mac(), false),
        ("apple.one_position_last", with(op("conv", &[1, 64, 1, 1])), mac(), false),
        // Two tokens on the last axis, a width that is no power of two, and one that is.
        ("apple.uneven_last_axis", bordered(&[1, 64, 1, 2]), mac(), true),
        ("apple.uneven_last_axis", bordered(&[1, 64, 1, 48]), mac(), true),
        ("apple.uneven_last_axis", bordered(&[1, 1, 1, 2816]), mac(), true),
        ("apple.uneven_last_axis", bordered(&[1, 1, 1, 2048]), mac(), false),
        (
            "value.beyond_fp16",
            changed(layers(9_000_000), |g| g.beyond_fp16 = Some("mask".into())),
            mac(),
            true,
        ),
        ("value.beyond_fp16", layers(9_000_000), mac(), false),
        ("apple.heads_together", heads(2), mac(), true),
        ("apple.heads_together", heads(1), mac(), false),
        ("apple.native_activation", with(op("gelu", &[1, 64])), mac(), true),
        ("apple.native_activation", with(op("sigmoid", &[1, 64])), mac(), false),
        ("value.gelu_m1", with(op("gelu", &[1, 64])), on("m1"), true),
        ("value.gelu_m1", with(op("gelu", &[1, 64])), on("m2"), false),
        ("apple.scaled_norm", scaled("abs"), mac(), true),
        ("apple.scaled_norm", scaled("mul"), mac(), false),
        // A router that looks for its best score, and a plain norm.
        ("apple.scaled_norm", router_and_norm, mac(), false),
        ("apple.long_context", with(extent("softmax", 2048)), mac(), true),
        ("apple.long_context", with(extent("softmax", 512)), mac(), false),
        ("apple.long_context", contexts(&[2048, 2048]), mac(), true),
        ("apple.long_context", contexts(&[2048, 512]), mac(), false),
        ("apple.shared_functions", functions(2, &[1, 4], states(&[64])), mac(), true),
        ("apple.shared_functions", functions(2, &[1, 4], layers(9_000_000)), mac(), false),
        ("apple.one_layer", changed(layers(50_000_000), |g| g.layers = Some(1)), mac(), true),
        ("apple.one_layer", changed(layers(50_000_000), |g| g.layers = Some(4)), mac(), false),
        ("law.floor_14mb", sized(9_000_000), mac(), true),
        ("law.floor_14mb", sized(14_000_000), mac(), false),
        ("law.small_50mb", sized(46_000_000), mac(), true),
        ("law.small_50mb", sized(54_000_000), mac(), false),
        ("law.cliff_96mb", sized(182_000_000), mac(), true),
        ("law.cliff_96mb", sized(90_000_000), mac(), false),
        ("law.wall_250mb", sized(288_000_000), mac(), true),
        ("law.wall_250mb", sized(182_000_000), mac(), false),
    ]
}

#[test]
fn every_rule_applies_where_it_should_and_only_there() {
    let (mut seen_to_apply, mut seen_to_not) = (BTreeSet::new(), BTreeSet::new());
    for (id, p, conditions, applies) in cases() {
        let report = check(&p, conditions);
        let said = rules(&report);
        assert_eq!(said.contains(id), applies, "{id} {conditions:?}: {said:?}\n{p:#?}");
        if applies {
            seen_to_apply.insert(id)
        } else {
            seen_to_not.insert(id)
        };
        let rule = rules::find(id).unwrap_or_else(|| panic!("no rule {id}"));
        if applies && rule.severity != RuleSeverity::Warning && rule.verdict != Verdict::Ane {
            assert!(report.verdict >= rule.verdict, "{id} does not decide: {report:#?}");
            let reason = report.reasons.iter().find(|r| r.rule == id).unwrap();
            assert!(!reason.text.is_empty(), "{id}");
        }
    }
    for rule in rules::all() {
        if matches!(rule.matcher, Matcher::Types(_) | Matcher::Bundle(_)) {
            continue;
        }
        assert!(seen_to_apply.contains(rule.id), "no case in which {} applies", rule.id);
        assert!(seen_to_not.contains(rule.id), "no case in which {} does not", rule.id);
    }
}

#[test]
fn every_op_type_of_the_table_gets_its_verdict() {
    let mut types = BTreeSet::new();
    for rule in rules::all() {
        let Matcher::Types(names) = rule.matcher else { continue };
        for name in names {
            assert!(types.insert(*name), "{name} is in two rows");
            let report = check(&with(op(name, &[1, 8])), mac());
            let listed = report.functions[0].op_list.last().unwrap();
            assert!(listed.rules.contains(&rule.id), "{name}: {listed:?}");
            assert!(listed.verdict >= rule.verdict, "{name}: {listed:?}");
        }
    }
    let report = check(&with(op("no_such_op", &[1, 8])), mac());
    assert_eq!(report.verdict, Verdict::Unknown);
    assert!(rules(&report).contains(NO_SIGHTING));
}

#[test]
fn bundle_rules_warn_and_decide_nothing() {
    let said = |b: &BundleFacts, c: &Conditions| -> Vec<&str> {
        let bundle = rules::all().filter(|r| match r.matcher {
            Matcher::Bundle(matches) => matches(b, c).is_some(),
            _ => false,
        });
        bundle.inspect(|r| assert_eq!(r.severity, RuleSeverity::Warning)).map(|r| r.id).collect()
    };
    assert_eq!(
        said(&BundleFacts { packages: 20, bytes: 2_000_000_000, most_tokens: Some(64) }, &mac()),
        [""; 0]
    );
    let by_token = BundleFacts { packages: 1, bytes: 1_000_000, most_tokens: Some(1) };
    assert_eq!(said(&by_token, &mac()), ["apple.prompts_by_token"]);
    let large = BundleFacts { packages: 270, bytes: 13_000_000_000, most_tokens: None };
    assert_eq!(said(&large, &mac()), ["load.together", "load.programs"]);
    assert_eq!(said(&large, &on("m1")), ["load.together", "load.together_m1", "load.programs"]);
}

#[test]
fn rows_of_the_table_are_complete() {
    let mut ids = BTreeSet::new();
    for r in rules::all() {
        assert!(ids.insert(r.id), "{} twice", r.id);
        assert!(
            r.id.split_once('.').is_some_and(|(area, name)| !area.is_empty() && !name.is_empty()),
            "{}",
            r.id
        );
        assert!(!r.text.is_empty(), "{}", r.id);
        let decides = r.severity != RuleSeverity::Warning && r.verdict != Verdict::Ane;
        assert!(!decides || !r.advice.is_empty() || r.id == "weight.unstated", "{}: what to change?", r.id);
        let nothing_published = ["weight.unstated", "weight.table_vector"].contains(&r.id);
        assert!(!r.evidence.is_empty() || nothing_published, "{}: why?", r.id);
    }
    assert!([NO_SIGHTING, UNDECIDED, IMPROBABLE, LIKELY].iter().all(|id| !ids.contains(id)));
}

/// Makes a function of two 1x1 convolutions with ten products between, as a package would hold it.
fn small_model(
    change: impl FnOnce(&mut FunctionBuilder, &mut Vec<anemoe_mlpackage::mil::builder::Var>),
) -> MlModel {
    let mut f = FunctionBuilder::new(Opset::CoreML8);
    let x = f.input("x", TensorType::fixed(F16, &[1, 2048, 1, 1])).unwrap();
    let w = f.constant("w", Value::blob(F16, &[2048, 2048, 1, 1], 64)).unwrap();
    let mut y = f.conv("a", &x, &w, None, ConvParams::default()).unwrap();
    for i in 0..10 {
        y = f.mul(&format!("m{i}"), &y, &y).unwrap();
    }
    let mut outputs = vec![f.conv("b", &y, &w, None, ConvParams::default()).unwrap()];
    change(&mut f, &mut outputs);
    for o in &outputs {
        f.output(o).unwrap();
    }
    model(Opset::CoreML8, vec![("main".into(), f.finish().unwrap())], "main").unwrap()
}

#[test]
fn a_layer_is_ane_and_one_op_of_it_can_be_elsewhere() {
    let report = check(&facts(&small_model(|_, _| {})), mac());
    assert_eq!(report.verdict, Verdict::Ane, "{report:#?}");
    assert_eq!((report.ops.ane, report.ops.cpu, report.ops.unknown), (12, 0, 0));
    // The constants: w, and for each convolution strides, pad_type, pad, dilations and groups.
    assert_eq!(report.ops.no_device, 11);
    // The shared weight is stored once.
    assert_eq!(report.weight_bytes.unwrap() / 1000, 2 * 2048 * 2048 / 1000);

    let report = check(
        &facts(&small_model(|f, outputs| {
            let y = outputs[0].clone();
            let s = f.reshape("flat", &y, &[1, 2048]).unwrap();
            outputs[0] = f.cumsum("sums", &s, 1, false, false).unwrap();
        })),
        mac(),
    );
    assert_eq!(report.verdict, Verdict::NotAne);
    assert_eq!((report.ops.ane, report.ops.cpu), (13, 1));
    assert!(!report.too_small);
    let reason = &report.reasons[0];
    assert_eq!((reason.rule, reason.op.as_str(), reason.op_type.as_str()), ("op.cumsum", "sums", "cumsum"));
    assert!(!reason.advice.is_empty() && !reason.evidence.is_empty());
}

/// Judges a pack of 16 experts of Gemma-4-26B-A4B as it is lowered: gate and up, GELU, the routing weight, down, sum.
fn pack(
    weight: impl Fn(&mut FunctionBuilder, &str, u64, u64) -> anemoe_mlpackage::mil::builder::Var,
) -> PackageReport {
    let mut f = FunctionBuilder::new(Opset::CoreML8);
    let x = f.input("x", TensorType::fixed(F16, &[1, 2816, 1, 1])).unwrap();
    let routing = f.input("routing", TensorType::fixed(F16, &[1, 16, 1, 1])).unwrap();
    let routing = f.split("weight", &routing, 16, 1).unwrap();
    let mut sum = None;
    for (i, routed) in routing.iter().enumerate() {
        let n = |name: &str| format!("e{i}_{name}");
        let w = weight(&mut f, &n("gate_up_weight"), 1408, 2816);
        let both = f.conv(&n("gate_up"), &x, &w, None, ConvParams::default()).unwrap();
        let halves = f.split(&n("half"), &both, 2, 1).unwrap();
        let gate = f
            .gelu(&n("gelu"), &halves[0], anemoe_mlpackage::mil::builder::GeluMode::TanhApproximation)
            .unwrap();
        let product = f.mul(&n("product"), &gate, &halves[1]).unwrap();
        let product = f.mul(&n("weighted"), &product, routed).unwrap();
        let w = weight(&mut f, &n("down_weight"), 2816, 704);
        let down = f.conv(&n("down"), &product, &w, None, ConvParams::default()).unwrap();
        sum = Some(match sum {
            Some(s) => f.add(&n("sum"), &s, &down).unwrap(),
            None => down,
        });
    }
    f.output(&sum.unwrap()).unwrap();
    let m = model(Opset::CoreML8, vec![("main".into(), f.finish().unwrap())], "main").unwrap();
    check(&facts(&m), mac())
}

/// Checks that the kinds that were measured on such packs are predicted as measured.
#[test]
fn packs_of_the_real_model_come_out_as_measured() {
    let offset = std::cell::Cell::new(0);
    let blob = |dtype, dims: &[u64]| {
        offset.set(offset.get() + 64);
        Value::blob(dtype, dims, offset.get())
    };
    let fp16 = pack(|f, name, n, k| f.constant(name, blob(F16, &[n, k, 1, 1])).unwrap());
    let lut4 = pack(|f, name, n, k| {
        let indices = blob(DataType::UInt4, &[n, k, 1, 1]);
        f.constexpr_lut_to_dense(name, indices, blob(F16, &[n / 32, 1, 1, 1, 16, 1])).unwrap()
    });
    let int8 = pack(|f, name, n, k| {
        f.constexpr_blockwise_shift_scale(name, blob(DataType::Int8, &[n, k, 1, 1]), blob(F16, &[1; 4]), None)
            .unwrap()
    });
    for (report, mb) in [(fp16, 190.3), (lut4, 47.7), (int8, 95.2)] {
        assert_eq!(report.verdict, Verdict::Ane, "{report:#?}");
        assert_eq!(report.ops.ane, report.ops.compute());
        assert!((report.weight_bytes.unwrap() as f64 / 1e6 - mb).abs() < 0.5, "{:?}", report.weight_bytes);
    }
    let int4 = pack(|f, name, n, k| {
        let data = blob(DataType::Int4, &[n, k, 1, 1]);
        f.constexpr_blockwise_shift_scale(name, data, blob(F16, &[n, k / 32, 1, 1]), None).unwrap()
    });
    assert_eq!((int4.verdict, int4.reasons[0].rule), (Verdict::NotAne, "weight.blocks_small"));
}

#[test]
fn positions_from_data_keep_the_whole_program_from_loading() {
    let m = small_model(|f, outputs| {
        let at = f.input("at", TensorType::fixed(DataType::Int32, &[4])).unwrap();
        let end = f.constant("end", Value::int32s(&[1, 2048, 1, 1])).unwrap();
        let args = vec![("x", (&outputs[0]).into()), ("begin", (&at).into()), ("end", (&end).into())];
        outputs[0] = f.op("slice_by_index", "cut", args).unwrap().remove(0);
    });
    let report = check(&facts(&m), mac());
    assert_eq!(report.functions[0].loads, Verdict::NotAne, "{report:#?}");
    assert_eq!(report.ops.ane, 0);
    // The same slice at a constant position is allowed.
    let m = small_model(|f, outputs| {
        let p = SliceParams { begin: vec![0; 4], end: vec![1, 1024, 1, 1], ..SliceParams::default() };
        outputs[0] = f.slice_by_index("cut", &outputs[0], p).unwrap();
    });
    assert_eq!(check(&facts(&m), mac()).verdict, Verdict::Ane);
}

#[test]
fn compression_is_told_by_its_shape_and_not_by_the_name_of_its_op() {
    let form = |make: &dyn Fn(&mut FunctionBuilder) -> anemoe_mlpackage::mil::builder::Var| {
        let mut f = FunctionBuilder::new(Opset::CoreML8);
        let x = f.input("x", TensorType::fixed(F16, &[1, 64, 1, 1])).unwrap();
        let w = make(&mut f);
        let y = f.conv("y", &x, &w, None, ConvParams::default()).unwrap();
        f.output(&y).unwrap();
        let m = model(Opset::CoreML8, vec![("main".into(), f.finish().unwrap())], "main").unwrap();
        facts(&m).graphs[0].weights[0].form.clone()
    };
    let blob = |d: DataType, dims: &[u64]| Value::blob(d, dims, 64);
    let shift = |scale: [u64; 4], bits: DataType| {
        move |f: &mut FunctionBuilder| {
            let data = Value::blob(bits, &[128, 64, 1, 1], 64);
            f.constexpr_blockwise_shift_scale("w", data, Value::blob(F16, &scale, 128), None).unwrap()
        }
    };
    assert_eq!(form(&shift([1, 1, 1, 1], DataType::Int8)), lin(8, Granularity::Tensor));
    assert_eq!(form(&shift([128, 1, 1, 1], DataType::Int8)), lin(8, Granularity::Channel));
    assert_eq!(form(&shift([128, 2, 1, 1], DataType::Int4)), lin(4, Granularity::Block));
    assert_eq!(form(&shift([4, 1, 1, 1], DataType::Int4)), lin(4, Granularity::Block));
    let table = |groups: [u64; 2]| {
        move |f: &mut FunctionBuilder| {
            let indices = Value::blob(DataType::UInt4, &[128, 64, 1, 1], 64);
            let lut = Value::blob(F16, &[groups[0], groups[1], 1, 1, 16, 1], 128);
            f.constexpr_lut_to_dense("w", indices, lut).unwrap()
        }
    };
    assert_eq!(form(&table([1, 1])), lut(&[], F16, 1, false));
    assert_eq!(form(&table([4, 1])), lut(&[0], F16, 1, false));
    assert_eq!(form(&table([4, 2])), lut(&[0, 1], F16, 1, false));
    assert_eq!(form(&|f| f.constant("w", blob(F16, &[128, 64, 1, 1])).unwrap()), StoredForm::Dense(F16));
}

#[test]
fn advice_has_the_figures_of_the_case() {
    let says = |p: &PackageFacts, c, rule: &str| {
        check(p, c).reasons.into_iter().find(|r| r.rule == rule).unwrap_or_else(|| panic!("{rule}")).advice
    };
    assert!(says(&layers(5_000_000_000), mac(), "load.program_size").contains("in 3"));
    assert!(says(&states(&[250]), mac(), "state.width").contains("256"));
    assert!(says(&with(product("conv", 40_000)), mac(), "shape.depth").contains("into 3"));
    assert!(
        says(&with(op("conv", &[64, 640, 1, 1])), mac(), "shape.batch_over_pixels")
            .contains("[1, 640, 1, 64]")
    );
}

#[test]
fn chips_are_read_and_others_refused() {
    for (text, mac, number) in [
        ("m4", true, 4),
        ("M3 Max", true, 3),
        ("A19 Pro", false, 19),
        (" M1 ", true, 1),
        ("m3max", true, 3),
        ("a17-pro", false, 17),
    ] {
        assert_eq!(Chip::parse(text), Some(Chip { mac, number }), "{text}");
    }
    for text in ["", "m", "m0", "a4", "x86", "m4fast", "macOS 26", "é"] {
        assert_eq!(Chip::parse(text), None, "{text}");
    }
}

#[test]
fn systems_are_read_and_others_refused() {
    for (text, release) in
        [("macOS 15.7.4", 15), ("macos26", 26), ("26", 26), ("26.0.1", 26), ("iOS 18", 15), ("iOS 26", 26)]
    {
        assert_eq!(SystemRelease::parse(text), Some(SystemRelease(release)), "{text}");
    }
    // Several releases, none, one before the ANE, numbers that no release has, and words.
    for text in [
        "",
        "macOS",
        "macOS 15/26",
        "26 / 15",
        "macOS 15 and 26",
        "15 junk",
        "015",
        "macOS 10.15",
        "iOS 13",
        "16",
        "iOS 19",
        "18",
        "999999999999",
        "M4",
        "26beta",
        "26..1",
        "é",
    ] {
        assert_eq!(SystemRelease::parse(text), None, "{text}");
    }
}

#[test]
fn constants_that_fp16_cannot_hold_are_named() {
    let found = |value: Value| {
        let model = small_model(|f, outputs| {
            let mask = f.constant("mask", value.clone()).unwrap();
            outputs[0] = f.add("masked", &outputs[0].clone(), &mask).unwrap();
        });
        facts(&model).graphs[0].beyond_fp16.clone()
    };
    let half = |bits: u16| Value::bytes(F16, &[], bits.to_le_bytes().to_vec());
    for infinity in [0x7c00, 0xfc00] {
        assert_eq!(found(half(infinity)).as_deref(), Some("mask"), "{infinity:#x}");
    }
    // -65504, the lowest value that is finite, and NaN.
    for other in [0xfbff, 0x7e00] {
        assert_eq!(found(half(other)), None, "{other:#x}");
    }
    let clipped = small_model(|f, outputs| {
        let top = f.constant("top", half(0x7c00)).unwrap();
        let bounds = f.constant("least", half(0)).unwrap();
        let args = vec![("x", (&outputs[0]).into()), ("alpha", (&bounds).into()), ("beta", (&top).into())];
        outputs[0] = f.single("clip", "clipped", args).unwrap();
    });
    assert_eq!(facts(&clipped).graphs[0].beyond_fp16, None);
}

#[test]
fn an_empty_package_is_unknown() {
    let report = check(&PackageFacts::default(), mac());
    assert_eq!(report.verdict, Verdict::Unknown);
    let empty = PackageFacts {
        weight_bytes: Some(0),
        graphs: vec![Graph { function: "f".into(), ..Graph::default() }],
    };
    assert_ne!(check(&empty, mac()).verdict, Verdict::Ane);
}

/// Checks that sizes which no file can hold cause no overflow: the package reader accepts any type of a result.
#[test]
fn sizes_without_measure_are_no_danger() {
    let huge = u64::MAX / 2;
    for name in ["conv", "matmul", "softmax", "topk", "scaled_dot_product_attention", "linear", "max_pool"] {
        let mut o = product(name, huge);
        o.inputs = vec![TensorType::fixed(F16, &[huge, huge, huge, huge])];
        (o.axis_extent, o.window) = (Some(huge), Some(huge));
        let c = o.contraction.as_mut().unwrap();
        (c.outputs, c.positions, c.kernel) = (Some(huge), Some(huge), vec![huge; 3]);
        for between in [false, true] {
            o.contraction.as_mut().unwrap().between_activations = between;
            let lone = changed(layers(u64::MAX), |g| g.ops = vec![o.clone()]);
            assert_ne!(check(&lone, phone()).verdict, Verdict::Ane);
            assert_ne!(check(&with(o.clone()), all_units()).verdict, Verdict::Ane);
        }
    }
}

/// Checks that a measured graph supports only graphs of similar size; layers with attention were measured larger than packs.
#[test]
fn the_nearest_measured_graph_has_a_reach() {
    let verdict = |p: &PackageFacts| check(p, mac()).verdict;
    let attending = |bytes: u64| {
        changed(layers(bytes), |g| g.states.push(GraphState { name: "s".into(), dims: vec![1, 4, 64, 64] }))
    };
    assert_eq!(verdict(&layers(450_000_000)), Verdict::Ane);
    let far = check(&layers(726 << 20), mac());
    assert_eq!((far.verdict, far.functions[0].support), (Verdict::Unknown, None));
    assert!(far.reasons[0].text.contains("761.3 MB") && far.reasons[0].text.contains("226.5 MB"), "{far:#?}");
    assert!(far.reasons[0].advice.contains("453.0 MB"), "{far:#?}");
    assert_eq!(verdict(&attending(726 << 20)), Verdict::Ane);
}

/// Checks that a probability decides where no rule does, and comes with its influences.
#[test]
fn probabilities_decide_where_rules_do_not() {
    let likely = check(&layers_of(lin(8, Granularity::Tensor), 100_000_000), mac());
    assert!(likely.verdict == Verdict::Ane && likely.probability >= 0.8, "{likely:#?}");
    assert!(likely.functions[0].influences.iter().any(|i| i.feature == "layers" && i.log_odds > 0.5));
    let lone = check(&few("linear", &[4900], StoredForm::Dense(F16), 50_000_000), mac());
    assert_eq!(lone.verdict, Verdict::Unknown, "{lone:#?}");
    assert!(lone.deciding_rule().starts_with(UNDECIDED), "{}", lone.deciding_rule());
    assert!(lone.reasons[0].text.contains("moved by"), "{lone:#?}");
    let ruled_out = check(&with(op("cumsum", &[1, 64])), mac());
    assert!(ruled_out.verdict == Verdict::NotAne && ruled_out.probability < 0.2, "{ruled_out:#?}");
}

/// Checks that both sides of a dispute are printed, and neither decides.
#[test]
fn packs_of_disputed_sizes_are_unknown_with_both_sides() {
    for mb in [364, 382, 398, 417] {
        let p = check(&layers_of(lin(8, Granularity::Tensor), mb * 1_000_000), mac());
        assert_eq!(p.verdict, Verdict::Unknown, "{mb}");
        let reason = p.reasons.iter().find(|r| r.rule == "prefer.size_disputed").unwrap();
        let says = |words: &str| reason.evidence.iter().any(|e| e.finding.starts_with(words));
        assert!(says("for the GPU") && says("for the ANE"), "{reason:?}");
    }
    assert_eq!(check(&layers_of(lin(8, Granularity::Tensor), 300_000_000), mac()).verdict, Verdict::Ane);
}

/// Checks that tiny functions excuse a package only where they hold its weights.
#[test]
fn a_tiny_function_does_not_excuse_the_others() {
    let parts = |sizes: &[u64]| {
        let graphs = sizes
            .iter()
            .enumerate()
            .map(|(i, &bytes)| Graph { function: format!("f{i}"), ..layers(bytes).graphs.remove(0) });
        PackageFacts { weight_bytes: Some(sizes.iter().sum()), graphs: graphs.collect() }
    };
    let small = |p: &PackageReport| p.small_functions.iter().map(|f| f.weight_bytes).collect::<Vec<_>>();
    // Functions of 3 MB are too small to compare with what was measured in fp16; functions of 9 MB are not.
    let report = check(&parts(&[600_000, 3_000_000]), mac());
    assert_eq!((report.verdict, report.too_small, small(&report)), (Verdict::Unknown, false, vec![600_000]));
    assert!(report.deciding_rule().starts_with("prefer.below_measured"), "{}", report.deciding_rule());
    let report = check(&parts(&[600_000, 9_000_000]), mac());
    assert_eq!((report.verdict, report.too_small, small(&report)), (Verdict::Ane, false, vec![600_000]));
    assert!(report.deciding_rule().starts_with("prefer.layer_graph"), "{}", report.deciding_rule());
    assert_eq!(report.summary.line, "conv 2/4 ane; 12 compute ops ane, 0 gpu, 12 cpu");
    // If all functions are tiny, or the tiny ones hold most weights, the whole package is excused.
    for sizes in [&[600_000, 700_000][..], &[900_000, 900_000, 900_000, 900_000, 900_000, 4_000_000]] {
        let report = check(&parts(sizes), mac());
        assert_eq!((report.verdict, report.too_small), (Verdict::NotAne, true), "{sizes:?}");
        assert!(report.small_functions.is_empty());
    }
    // A rule other than those about size is no excuse.
    let mut off = parts(&[600_000, 9_000_000]);
    off.graphs[1].ops.push(op("gather", &[1, 64]));
    let report = check(&off, mac());
    assert_eq!((report.verdict, report.too_small), (Verdict::NotAne, false));
}

/// Checks that inputs over a range of tokens have as many sizes as the range, even with rows before the first token.
#[test]
fn ranges_are_judged_by_their_sizes() {
    use anemoe_mlpackage::mil::FeatureShape;
    let shapes = |low: u64, high: Option<u64>| {
        let mut f = FunctionBuilder::new(Opset::CoreML8);
        let x = f.input("x", TensorType::fixed(F16, &[1, 64, 1, 1])).unwrap();
        let y = f.mul("y", &x, &x).unwrap();
        f.output(&y).unwrap();
        let mut m = model(Opset::CoreML8, vec![("main".into(), f.finish().unwrap())], "main").unwrap();
        let fixed = |n: u64| (n, Some(n));
        m.functions[0].inputs[0].shape = FeatureShape::Range {
            default: vec![1, 64, 1, low],
            ranges: vec![fixed(1), fixed(64), fixed(1), (low, high)],
        };
        facts(&m).graphs[0].shapes
    };
    assert_eq!(shapes(1, Some(4)), Shapes::Ranged(Some(4)));
    assert_eq!(shapes(3, Some(6)), Shapes::Ranged(Some(4)));
    assert_eq!(shapes(1, Some(512)), Shapes::Ranged(Some(512)));
    assert_eq!(shapes(0, Some(4)), Shapes::Ranged(Some(4)));
    assert_eq!(shapes(2, None), Shapes::Ranged(None));
}
