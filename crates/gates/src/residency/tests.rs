//! Tests each rule where it applies and where it does not, and whole programs.

use super::rule::{
    BundleFacts, Chip, Conditions, DeviceTarget, Matcher, Question, RuleSeverity, Units, Verdict,
};
use super::verdict::{ALIKE, Judge, MEASURED, NO_SIGHTING, NOTHING_ALIKE, PackageReport};
use super::{facts, outcomes, rules};
use crate::program_facts::PackageFacts;
use crate::program_facts::graph::{
    Contraction, Graph, GraphKind, GraphState, GraphWeight, Op, Shapes, StoredForm,
};
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
        kind: GraphKind::Layers,
        ops,
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
        g.kind = match (depths.len(), op_type) {
            (1, "conv") => GraphKind::Conv,
            (1, _) => GraphKind::Linear,
            _ => GraphKind::Few,
        };
    })
}

fn kind(kind: GraphKind, p: PackageFacts) -> PackageFacts {
    changed(p, |g| g.kind = kind)
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
        (g.ops, g.weights, g.kind) = (vec![o], vec![], GraphKind::Matmul);
    })
}

fn attention(n: u64) -> PackageFacts {
    changed(between(8), |g| {
        g.ops = vec![op("scaled_dot_product_attention", &[1, 1, n, 64])];
        g.kind = GraphKind::Attention;
    })
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
    Judge::new(c, None).package("p", p, true)
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
    let glue = |bytes: u64| changed(layers(bytes), |g| g.kind = GraphKind::Glue);
    let tokens = |n: u64, bytes: u64| changed(layers(bytes), |g| g.positions = Some(n));
    let trivial = |n: u64| {
        changed(layers(1), |g| {
            (g.weight_bytes, g.op_count, g.weights) = (None, Some(n), vec![]);
            (g.ops, g.kind) = (vec![op("mul", &[1, 64])], GraphKind::Other);
        })
    };
    let dense = || StoredForm::Dense(F16);
    let wide = || {
        let mut o = product("conv", 512);
        o.contraction.as_mut().unwrap().outputs = Some(87_424);
        with(o)
    };
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
        ("shape.depth", with(product("conv", 16_385)), mac(), true),
        ("shape.depth", with(product("conv", 16_384)), mac(), false),
        ("shape.depth_new_chip", with(product("conv", 17_408)), on("m5"), true),
        ("shape.depth_new_chip", with(product("conv", 17_408)), on("m3"), false),
        ("shape.spatial", with(op("conv", &[1, 3, 1, 20_000])), mac(), true),
        ("shape.spatial", with(op("conv", &[1, 3, 1, 20_000])), on("m4"), false),
        ("shape.runtime_bound", with(runtime), mac(), true),
        ("shape.runtime_bound", with(op("slice_by_index", &[1, 64])), mac(), false),
        ("shape.conv_3d", with(kernel(&[3, 3, 3], 1, 16)), mac(), true),
        ("shape.conv_3d", with(kernel(&[3, 3], 1, 16)), mac(), false),
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
        ("prefer.layers", layers_of(lut(&[0], F16, 1, false), 20_000_000), phone(), true),
        ("prefer.layers", layers_of(lut(&[0], F16, 1, false), 46_000_000), mac(), false),
        ("prefer.head", kind(GraphKind::Head, layers_of(lut(&[0], F16, 1, false), 46_000_000)), mac(), true),
        ("prefer.head", kind(GraphKind::Head, layers_of(int8(), 154_000_000)), mac(), false),
        ("prefer.unnamed_ops", changed(sized(98_000_000), |g| g.op_count = Some(400)), mac(), true),
        ("prefer.unnamed_ops", changed(sized(98_000_000), |g| g.op_count = Some(50)), mac(), false),
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
        ("shape.channels_old", wide(), on("m3"), true),
        ("shape.channels_old", wide(), on("m4"), false),
        ("shape.channels", wide(), mac(), true),
        ("shape.channels", wide(), on("m3"), false),
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
        ("apple.uneven_last_axis", bordered(&[1, 1, 1, 2816]), mac(), false),
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
        if matches!(rule.matcher, Matcher::Types | Matcher::Bundle(_)) {
            continue;
        }
        assert!(seen_to_apply.contains(rule.id.as_str()), "no case in which {} applies", rule.id);
        assert!(seen_to_not.contains(rule.id.as_str()), "no case in which {} does not", rule.id);
    }
}

#[test]
fn every_op_type_of_the_table_gets_its_verdict() {
    let mut types = BTreeSet::new();
    for rule in rules::all() {
        for name in &rule.types {
            assert!(types.insert(name), "{name} is in two rows");
            let report = check(&with(op(name, &[1, 8])), mac());
            let listed = report.functions[0].op_list.last().unwrap();
            assert!(listed.rules.contains(&rule.id.as_str()), "{name}: {listed:?}");
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
        bundle.inspect(|r| assert_eq!(r.severity, RuleSeverity::Warning)).map(|r| r.id.as_str()).collect()
    };
    assert_eq!(
        said(&BundleFacts { packages: 20, bytes: 2_000_000_000, most_tokens: Some(64) }, &mac()),
        [""; 0]
    );
    let by_token = BundleFacts { packages: 1, bytes: 1_000_000, most_tokens: Some(1) };
    assert_eq!(said(&by_token, &mac()), ["apple.prompts_by_token"]);
    let large = BundleFacts { packages: 270, bytes: 13_000_000_000, most_tokens: None };
    assert_eq!(said(&large, &mac()), ["load.together"]);
}

#[test]
fn rows_of_the_table_are_complete() {
    let mut ids = BTreeSet::new();
    for r in rules::all() {
        assert!(ids.insert(r.id.as_str()), "{} twice", r.id);
        assert!(
            r.id.split_once('.').is_some_and(|(area, name)| !area.is_empty() && !name.is_empty()),
            "{}",
            r.id
        );
        assert!(!r.text.is_empty(), "{}", r.id);
        let against = r.decides() && r.verdict != Verdict::Ane;
        assert!(!against || !r.advice.is_empty(), "{}: what to change?", r.id);
        assert!(!r.evidence.is_empty() || r.id == "weight.table_vector", "{}: why?", r.id);
    }
    assert!([NO_SIGHTING, ALIKE, NOTHING_ALIKE, MEASURED].iter().all(|id| !ids.contains(id)));
}

/// Checks that evidence points to rows that exist, and that one of a rule's rows shows what the rule says.
#[test]
fn evidence_points_into_the_table_of_outcomes() {
    let known = outcomes::parse(outcomes::KNOWN).unwrap();
    let mut pointers = 0;
    for rule in rules::all() {
        let row = |id: &String| known.iter().find(|row| row.id == *id);
        let rows = rule.evidence.iter().flat_map(|e| &e.rows);
        let found: Vec<Option<Verdict>> =
            rows.map(|id| row(id).unwrap_or_else(|| panic!("{}: no row {id}", rule.id)).truth()).collect();
        pointers += found.len();
        let shown = found.is_empty() || found.contains(&Some(rule.verdict));
        assert!(shown || rule.verdict == Verdict::Unknown || !rule.decides(), "{}", rule.id);
    }
    assert!(pointers > 100, "{pointers}");
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
    assert!(report.reasons.iter().any(|r| r.question == Question::Loads), "{report:#?}");
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
    // The pair of ops of `mxfp4`; the table is no weight of its own.
    let pair = form(&|f| {
        let table = Value::blob(F16, &[1, 1, 1, 1, 16, 1], 128);
        let data = f.constexpr_lut_to_dense("t", blob(DataType::UInt4, &[128, 64, 1, 1]), table).unwrap();
        let operands =
            vec![("data", (&data).into()), ("scale", Value::blob(F16, &[128, 2, 1, 1], 192).into())];
        f.single("constexpr_blockwise_shift_scale", "w", operands).unwrap()
    });
    assert_eq!(pair, lut(&[], F16, 1, true));
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
        o.axis_extent = Some(huge);
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

/// Checks that the nearest measured graphs on both sides decide, that the last one reaches twice as far, and that
/// contradictions and sizes beyond are unknown.
#[test]
fn the_nearest_measured_graphs_decide() {
    let said = |p: &PackageFacts| {
        let r = check(p, mac());
        let f = &r.functions[0];
        (r.verdict, f.support.or(r.reasons.first().map(|r| r.rule)).unwrap(), f.precedents.join(" "))
    };
    let int8 = |bytes: u64| layers_of(lin(8, Granularity::Tensor), bytes);
    let tables = |bytes: u64| layers_of(lut(&[0], F16, 1, false), bytes);
    assert_eq!(said(&int8(96_000_000)), (Verdict::Ane, ALIKE, "PHI1 HYMT2".into()));
    assert_eq!(said(&int8(30_000_000)), (Verdict::Ane, ALIKE, "GATT8 UGPT1".into()));
    assert_eq!(said(&tables(24_000_000)), (Verdict::Ane, ALIKE, "GFFN4P".into()));
    assert_eq!(said(&tables(14_000_000)), (Verdict::Unknown, NOTHING_ALIKE, "GFFN4P".into()));
    assert_eq!(said(&tables(22_000_000)), (Verdict::Ane, "prefer.layers", String::new()));
    assert_eq!(said(&tables(204_000_000)), (Verdict::Ane, "prefer.layers", String::new()));
    let linear = |depth: u64| few("linear", &[depth], StoredForm::Dense(F16), 50_000_000);
    for (depth, verdict) in
        [(2500, Verdict::NotAne), (4096, Verdict::NotAne), (5120, Verdict::Ane), (8000, Verdict::Ane)]
    {
        assert_eq!(said(&linear(depth)).0, verdict, "{depth}");
    }
    let both = check(&linear(5000), mac());
    assert_eq!((both.verdict, both.reasons[0].rule), (Verdict::Unknown, ALIKE));
    let evidence = &both.reasons[0].evidence;
    assert!(
        evidence.iter().any(|e| e.finding.ends_with("CPU_ALL") && e.rows == ["LQ4864x5120"]),
        "{evidence:?}"
    );
    assert!(evidence.iter().any(|e| e.finding.ends_with("ANE_ALL")), "{evidence:?}");
    // Fused attention and products of computed matrices have measured graphs of their own kind.
    assert_eq!([1 << 14, 1 << 15].map(|n| said(&attention(n)).0), [Verdict::NotAne, Verdict::Ane]);
    assert_eq!([384, 512].map(|n| said(&between(n)).0), [Verdict::NotAne, Verdict::Ane]);
    // Rules stand over measured graphs.
    assert_eq!(check(&with(op("cumsum", &[1, 64])), mac()).reasons[0].rule, "op.cumsum");
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
    // Functions of 3 MB are smaller than any layers that were measured.
    let report = check(&parts(&[600_000, 3_000_000]), mac());
    assert_eq!((report.verdict, report.too_small, small(&report)), (Verdict::Unknown, false, vec![600_000]));
    assert!(report.deciding_rule().starts_with(NOTHING_ALIKE), "{}", report.deciding_rule());
    let report = check(&parts(&[600_000, 9_000_000]), mac());
    assert_eq!((report.verdict, report.too_small, small(&report)), (Verdict::Ane, false, vec![600_000]));
    assert!(report.deciding_rule().starts_with("prefer.layers"), "{}", report.deciding_rule());
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
