//! Reads MIL programs into [`Graph`]s. Weight data is never read: sizes and compression follow from types.

use super::graph::{
    Contraction, Graph, GraphKind, GraphState, GraphWeight, LAYER_OPS, Op, PackageFacts, Shapes, StoredForm,
};
use anemoe_convert::quant::Granularity;
use anemoe_mlpackage::mil::{
    Argument, Binding, Block, DataType, Dim, FeatureShape, Function, FunctionDescription, Immediate, MlModel,
    Operation, TensorData, TensorType, Value, ValueData, ValueType,
};
use std::collections::{BTreeSet, HashMap, HashSet};

/// Fewest outputs of a product that makes a vocabulary head: wider than the models' hidden layers. Narrower heads
/// cause no problem.
const VOCABULARY: u64 = 32_000;

/// Returns the facts of a model's functions, and the bytes of weights that they store, shared ones once. Weight data is
/// not read.
pub fn facts(model: &MlModel) -> PackageFacts {
    let mut shared = HashSet::new();
    let mut total = 0u64;
    let graphs = model
        .program
        .functions
        .iter()
        .map(|(name, f)| {
            let described = model.functions.iter().find(|d| &d.name == name);
            let mut walker = Walker::new(name, f, described);
            walker.block(&f.block);
            for name in &f.block.outputs {
                if let Some(known) = walker.scope.get(name.as_str()) {
                    walker.graph.borders.push((name.clone(), shape(known.ty)));
                }
            }
            for (key, bytes) in &walker.blobs {
                if shared.insert(*key) {
                    total = total.saturating_add(*bytes);
                }
            }
            total = total.saturating_add(walker.immediate_bytes);
            walker.finish()
        })
        .collect();
    PackageFacts { weight_bytes: Some(total), graphs }
}

/// Origin of a value, in ascending order of dependence on data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ProducedBy {
    /// A constant.
    Constant,
    /// Computed from the sizes of tensors only.
    Sizes,
    /// Computed from data, or an input.
    Data,
}

#[derive(Clone)]
struct KnownInScope<'a> {
    ty: &'a ValueType,
    origin: ProducedBy,
    value: Option<&'a Value>,
    weight: Option<usize>,
    from_state: bool,
    /// True if `concat` made the value.
    joined: bool,
}

impl<'a> KnownInScope<'a> {
    fn new(ty: &'a ValueType, origin: ProducedBy) -> KnownInScope<'a> {
        KnownInScope { ty, origin, value: None, weight: None, from_state: false, joined: false }
    }
}

struct Walker<'a> {
    graph: Graph,
    scope: HashMap<&'a str, KnownInScope<'a>>,
    /// Bytes of the blobs that the function uses, by file and offset.
    blobs: HashMap<(&'a str, u64), u64>,
    immediate_bytes: u64,
    /// Most elements of a state that an op reads or writes at once.
    reach: u64,
}

/// Largest finite value of fp16.
const MOST_OF_FP16: f32 = 65504.0;
/// Bits of infinity in fp16.
const FP16_INFINITY: u16 = 0x7c00;

/// Returns the bytes of a value's elements; 0 where its shape is not fixed.
fn stored_bytes(value: &Value) -> u64 {
    let ty = value.ty.tensor();
    ty.and_then(|t| t.dtype.packed_bytes(t.elements()?)).unwrap_or(0)
}

/// Tells whether a float that the program itself holds is an infinity, or larger than fp16 can hold. Values of weight
/// files are not read.
fn is_beyond_fp16(value: &Value) -> bool {
    let ValueData::Immediate(Immediate::Tensor(data)) = &value.data else { return false };
    let is_half = value.ty.tensor().is_some_and(|t| t.dtype == DataType::Float16);
    match data {
        TensorData::Floats(all) => all.iter().any(|x| x.abs() > MOST_OF_FP16),
        TensorData::Bytes(all) if is_half => {
            let mut halves = all.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
            halves.any(|bits| bits & 0x7fff == FP16_INFINITY)
        }
        _ => false,
    }
}

fn shape(ty: &ValueType) -> Vec<u64> {
    ty.tensor().map(|t| t.dims.iter().map(|d| d.fixed().unwrap_or(0)).collect()).unwrap_or_default()
}

impl<'a> Walker<'a> {
    fn new(name: &str, f: &'a Function, described: Option<&FunctionDescription>) -> Self {
        let mut graph = Graph { function: name.to_string(), op_count: Some(0), ..Graph::default() };
        let mut scope = HashMap::new();
        for input in &f.inputs {
            scope.insert(input.name.as_str(), KnownInScope::new(&input.ty, ProducedBy::Data));
            if input.ty.tensor().is_some() {
                graph.borders.push((input.name.clone(), shape(&input.ty)));
            }
            if let Some(bytes) = input.ty.tensor().and_then(|t| t.dtype.packed_bytes(t.elements()?)) {
                graph.input_bytes.insert(input.name.clone(), bytes);
            }
            if let ValueType::State(ty) = &input.ty {
                graph
                    .states
                    .push(GraphState { name: input.name.clone(), dims: ty.shape().unwrap_or_default() });
            }
        }
        graph.shapes = described.map_or(Shapes::Fixed, shapes);
        Walker { graph, scope, blobs: HashMap::new(), immediate_bytes: 0, reach: 0 }
    }

    fn block(&mut self, block: &'a Block) {
        for input in &block.inputs {
            self.scope.insert(&input.name, KnownInScope::new(&input.ty, ProducedBy::Data));
        }
        for op in &block.operations {
            if op.op_type == "const" {
                self.constant(op);
            } else if op.op_type.starts_with("constexpr_") {
                self.compressed(op);
            } else {
                self.compute(op);
            }
        }
    }

    /// Adds the bytes of a stored value to the function's, a blob once however often it is used. Returns the bytes.
    fn count(&mut self, value: &'a Value) -> u64 {
        let bytes = stored_bytes(value);
        match &value.data {
            ValueData::Blob { file, offset } => drop(self.blobs.insert((file, *offset), bytes)),
            ValueData::Immediate(_) => self.immediate_bytes = self.immediate_bytes.saturating_add(bytes),
        }
        bytes
    }

    fn constant(&mut self, op: &'a Operation) {
        self.without_device(op);
        let (Some(value), Some(output)) = (op.attributes.get("val"), op.outputs.first()) else { return };
        let bytes = self.count(value);
        let weight = output.ty.tensor().filter(|t| t.rank() >= 1 && t.dtype.is_float()).map(|t| {
            self.weight(GraphWeight {
                name: output.name.clone(),
                dims: shape(&output.ty),
                form: StoredForm::Dense(t.dtype),
                bytes,
            })
        });
        let known = KnownInScope::new(&output.ty, ProducedBy::Constant);
        self.scope.insert(&output.name, KnownInScope { value: Some(value), weight, ..known });
    }

    fn without_device(&mut self, op: &Operation) {
        *self.graph.no_device.entry(op.op_type.clone()).or_default() += 1;
    }

    fn weight(&mut self, weight: GraphWeight) -> usize {
        self.graph.weights.push(weight);
        self.graph.weights.len() - 1
    }

    /// Returns type, stored value and known facts of an operand. Operands of `constexpr_*` ops are attributes up to
    /// iOS17, inputs since.
    fn operand<'b>(
        &'b self,
        op: &'a Operation,
        param: &str,
    ) -> Option<(&'a ValueType, Option<&'a Value>, Option<&'b KnownInScope<'a>>)> {
        if let Some(value) = op.attributes.get(param) {
            return Some((&value.ty, Some(value), None));
        }
        match op.inputs.get(param)?.0.first()? {
            Binding::Value(value) => Some((&value.ty, Some(value), None)),
            Binding::Name(name) => {
                let known = self.scope.get(name.as_str())?;
                Some((known.ty, known.value, Some(known)))
            }
        }
    }

    fn compressed(&mut self, op: &'a Operation) {
        self.without_device(op);
        let Some(output) = op.outputs.first() else { return };
        let mut bytes = 0u64;
        for (name, value) in &op.attributes {
            // `axis` and `shape` are few bytes, and count; `name` is text.
            if name != "name" {
                bytes = bytes.saturating_add(self.count(value));
            }
        }
        let mut inner = Vec::new();
        for Argument(bindings) in op.inputs.values() {
            for binding in bindings {
                match binding {
                    Binding::Value(value) => bytes = bytes.saturating_add(self.count(value)),
                    Binding::Name(name) => inner.extend(self.scope.get(name.as_str()).and_then(|k| k.weight)),
                }
            }
        }
        bytes = inner.iter().fold(bytes, |n, &i| n.saturating_add(self.graph.weights[i].bytes));
        let form = self.form(op, output.ty.tensor(), &inner);
        let weight = GraphWeight { name: output.name.clone(), dims: shape(&output.ty), form, bytes };
        // A weight that another constexpr takes as operand is no stored weight of its own.
        for i in inner {
            self.graph.weights[i].bytes = 0;
        }
        let weight = Some(self.weight(weight));
        let known = KnownInScope::new(&output.ty, ProducedBy::Constant);
        self.scope.insert(&output.name, KnownInScope { weight, ..known });
    }

    fn form(&self, op: &'a Operation, dense: Option<&TensorType>, inner: &[usize]) -> StoredForm {
        let inner_compressed =
            inner.iter().map(|&i| &self.graph.weights[i].form).find(|f| !matches!(f, StoredForm::Dense(_)));
        let chained = inner_compressed.is_some();
        let ty = |param: &str| self.operand(op, param).and_then(|o| o.0.tensor());
        match op.op_type.as_str() {
            "constexpr_lut_to_dense" => {
                let (Some(lut), Some(indices)) = (ty("lut"), ty("indices")) else {
                    return StoredForm::Unstated;
                };
                if indices.rank() + 2 != lut.rank() {
                    // Before iOS18: one table of 2^bits entries, and packed indices.
                    let entries = lut.elements().unwrap_or(1).max(1);
                    let bits = u64::from(entries.ilog2());
                    return StoredForm::Lut {
                        bits,
                        grouped_axes: vec![],
                        entries: lut.dtype,
                        vector: 1,
                        scaled: chained,
                    };
                }
                let groups = &lut.dims[..indices.rank()];
                let grouped_axes = (0..groups.len()).filter(|&i| groups[i] != Dim::Fixed(1)).collect();
                let vector = lut.dims[lut.rank() - 1].fixed().unwrap_or(1);
                StoredForm::Lut {
                    bits: indices.dtype.bits() as u64,
                    grouped_axes,
                    // Tables of scaled integers have the type of the scales here.
                    entries: if chained { DataType::Int8 } else { lut.dtype },
                    vector,
                    scaled: chained,
                }
            }
            "constexpr_blockwise_shift_scale" => {
                if let Some(StoredForm::Lut { bits, grouped_axes, entries, vector, .. }) = inner_compressed {
                    let (bits, grouped_axes) = (*bits, grouped_axes.clone());
                    return StoredForm::Lut {
                        bits,
                        grouped_axes,
                        entries: *entries,
                        vector: *vector,
                        scaled: true,
                    };
                }
                let (Some(data), Some(scale)) = (ty("data"), ty("scale")) else {
                    return StoredForm::Unstated;
                };
                let cut: Vec<usize> = (0..scale.rank()).filter(|&i| scale.dims[i] != Dim::Fixed(1)).collect();
                let whole = |i: usize| data.dims.get(i) == scale.dims.get(i);
                let grain = match cut.as_slice() {
                    [] => Granularity::Tensor,
                    [i] if whole(*i) => Granularity::Channel,
                    _ => Granularity::Block,
                };
                StoredForm::Linear { bits: data.dtype.bits() as u64, grain }
            }
            "constexpr_affine_dequantize" => {
                let per_channel = ty("scale").is_some_and(|s| s.elements().unwrap_or(1) > 1);
                let grain = if per_channel { Granularity::Channel } else { Granularity::Tensor };
                StoredForm::Linear { bits: ty("quantized_data").map_or(8, |d| d.dtype.bits() as u64), grain }
            }
            "constexpr_cast" => StoredForm::Dense(dense.map_or(DataType::Float16, |t| t.dtype)),
            _ => StoredForm::Sparse,
        }
    }

    fn compute(&mut self, op: &'a Operation) {
        let mut described = Op {
            name: op.name().to_string(),
            result: op.outputs.first().map(|o| o.name.clone()).unwrap_or_default(),
            op_type: op.op_type.clone(),
            ..Op::default()
        };
        let mut origin = ProducedBy::Constant;
        let mut from_state = op.op_type == "read_state";
        for (param, Argument(bindings)) in &op.inputs {
            for binding in bindings {
                let Binding::Name(name) = binding else { continue };
                let Some(known) = self.scope.get(name.as_str()) else { continue };
                origin = origin.max(known.origin);
                // Infinite bounds of a `clip` mean none.
                if self.graph.beyond_fp16.is_none()
                    && op.op_type != "clip"
                    && known.value.is_some_and(is_beyond_fp16)
                {
                    self.graph.beyond_fp16 = Some(name.clone());
                }
                if known.origin != ProducedBy::Constant
                    && let ValueType::Tensor(ty) = known.ty
                {
                    described.inputs.push(ty.clone());
                }
                described.writes_joined |= op.op_type == "write_state" && param == "data" && known.joined;
                described.weights.extend(known.weight.filter(|_| param != "bias"));
                if known.origin == ProducedBy::Data && decides_shape(&op.op_type, param) {
                    described.runtime_bounds.push(param.clone());
                }
                if op.op_type == "slice_update" && param == "x" && known.from_state {
                    (described.updates_state, from_state) = (true, true);
                }
                if known.from_state {
                    let elements = |ty: Option<&TensorType>| ty.and_then(TensorType::elements).unwrap_or(0);
                    let part = match op.op_type.as_str() {
                        "slice_by_size" | "slice_by_index" => {
                            elements(op.outputs.first().and_then(|o| o.ty.tensor()))
                        }
                        "slice_update" if param == "x" => {
                            elements(self.operand(op, "update").and_then(|o| o.0.tensor()))
                        }
                        "write_state" => 0,
                        _ => elements(known.ty.tensor()),
                    };
                    self.reach = self.reach.max(part);
                }
            }
        }
        if op.op_type == "shape" {
            origin = ProducedBy::Sizes;
        }
        described.outputs = op.outputs.iter().filter_map(|o| o.ty.tensor().cloned()).collect();
        described.contraction = self.contraction(op, &described);
        described.axis_extent = self.axis_extent(op);
        described.stride =
            self.ints(op, "strides").and_then(|s| s.into_iter().max()).map(|s| s.max(1) as u64);
        self.graph.op_count = self.graph.op_count.map(|n| n + 1);
        self.graph.ops.push(described);
        for block in &op.blocks {
            self.block(block);
        }
        for output in &op.outputs {
            let known = KnownInScope::new(&output.ty, origin);
            let joined = op.op_type == "concat";
            self.scope.insert(&output.name, KnownInScope { from_state, joined, ..known });
        }
    }

    fn ints(&self, op: &'a Operation, param: &str) -> Option<Vec<i64>> {
        match self.operand(op, param)?.1?.tensor_data()? {
            TensorData::Ints(v) => Some(v.iter().map(|&x| i64::from(x)).collect()),
            _ => None,
        }
    }

    fn contraction(&self, op: &'a Operation, described: &Op) -> Option<Contraction> {
        let fixed = |t: &TensorType, i: usize| t.dims.get(i).and_then(|d| d.fixed());
        let product = |dims: &[Dim]| dims.iter().map(|d| d.fixed()).try_fold(1u64, |a, d| a.checked_mul(d?));
        let output = described.outputs.first()?;
        match op.op_type.as_str() {
            "conv" | "conv_transpose" => {
                let weight = self.operand(op, "weight")?;
                let ty = weight.0.tensor()?;
                let groups =
                    self.ints(op, "groups").and_then(|g| g.first().copied()).unwrap_or(1).max(1) as u64;
                let transposed = op.op_type == "conv_transpose";
                let kernel = ty.dims.iter().skip(2).filter_map(|d| d.fixed()).collect();
                let stored = weight.1.is_some() || weight.2.is_some_and(|k| k.origin == ProducedBy::Constant);
                Some(Contraction {
                    depth: if transposed { fixed(ty, 0).map(|c| c / groups) } else { fixed(ty, 1) },
                    outputs: if transposed { fixed(output, 1) } else { fixed(ty, 0) },
                    positions: product(output.dims.get(2..)?)
                        .and_then(|p| p.checked_mul(fixed(output, 0).unwrap_or(1))),
                    kernel,
                    groups,
                    between_activations: !stored,
                })
            }
            "linear" => {
                let ty = self.operand(op, "weight")?.0.tensor()?;
                let rows = output.dims.get(..output.rank().saturating_sub(1))?;
                Some(Contraction {
                    depth: fixed(ty, 1),
                    outputs: fixed(ty, 0),
                    positions: product(rows),
                    kernel: vec![],
                    groups: 1,
                    between_activations: false,
                })
            }
            "matmul" => {
                let (x, y) = (self.operand(op, "x")?, self.operand(op, "y")?);
                let stored = |o: &(&ValueType, Option<&Value>, Option<&KnownInScope<'_>>)| {
                    o.2.is_none_or(|k| k.origin == ProducedBy::Constant)
                };
                let transposed =
                    self.operand(op, "transpose_x").and_then(|o| o.1?.as_bool()).unwrap_or(false);
                let tx = x.0.tensor()?;
                let axis = tx.rank().checked_sub(if transposed { 2 } else { 1 })?;
                let positions = product(output.dims.get(..output.rank().saturating_sub(1))?);
                Some(Contraction {
                    depth: fixed(tx, axis),
                    outputs: fixed(output, output.rank().checked_sub(1)?),
                    positions,
                    kernel: vec![],
                    groups: 1,
                    between_activations: !stored(&x) && !stored(&y),
                })
            }
            _ => None,
        }
    }

    fn axis_extent(&self, op: &'a Operation) -> Option<u64> {
        if !matches!(op.op_type.as_str(), "topk" | "reduce_argmax" | "reduce_argmin" | "softmax") {
            return None;
        }
        let x = self.operand(op, "x")?.0.tensor()?;
        let axis = self.ints(op, "axis").and_then(|a| a.first().copied()).unwrap_or(-1);
        let axis = if axis < 0 { axis + x.rank() as i64 } else { axis };
        x.dims.get(usize::try_from(axis).ok()?)?.fixed()
    }

    fn finish(mut self) -> Graph {
        let used: BTreeSet<usize> = self.graph.ops.iter().flat_map(|op| op.weights.iter().copied()).collect();
        // Constants that only set parameters of ops (masks, epsilons) are no weights, and neither are operands of a
        // constexpr.
        let renumber: HashMap<usize, usize> = used
            .iter()
            .filter(|&&i| self.graph.weights[i].bytes > 0)
            .enumerate()
            .map(|(n, &i)| (i, n))
            .collect();
        let mut kept = Vec::with_capacity(renumber.len());
        for (i, weight) in std::mem::take(&mut self.graph.weights).into_iter().enumerate() {
            if renumber.contains_key(&i) {
                kept.push(weight);
            }
        }
        self.graph.weights = kept;
        for op in &mut self.graph.ops {
            op.weights = op.weights.iter().filter_map(|i| renumber.get(i).copied()).collect();
        }
        let g = &mut self.graph;
        g.state_reach = g.ops.iter().any(|op| op.updates_state).then_some(self.reach);
        g.weight_bytes = Some(self.blobs.values().fold(self.immediate_bytes, |n, b| n.saturating_add(*b)));
        let attention = |op: &&Op| matches!(op.op_type.as_str(), "softmax" | "scaled_dot_product_attention");
        g.layers = Some(g.ops.iter().filter(attention).count() as u64);
        g.positions = g.matrices().filter_map(|(_, c)| c.positions).max();
        // A function with a range of token counts has no fixed positions; one position is the least.
        if g.positions.is_none() && g.matrices().next().is_some() {
            g.positions = Some(1);
        }
        // A bank of experts is as wide as a vocabulary, but is not the last product.
        g.vocabulary_head = g.matrices().last().is_some_and(|(_, c)| c.outputs >= Some(VOCABULARY));
        g.kind = kind(g);
        self.graph
    }
}

/// Returns the kind of a graph whose ops are all known.
fn kind(g: &Graph) -> GraphKind {
    let mut all = g.matrices();
    let (first, second) = (all.next(), all.next());
    let products = g.ops.iter().filter(|op| op.contraction.is_some()).count();
    let fused = |op: &Op| op.op_type == "scaled_dot_product_attention";
    let few_ops = g.at_least_ops() < LAYER_OPS;
    match (first, second) {
        _ if is_glue(g) => GraphKind::Glue,
        (Some(_), None) if g.vocabulary_head => GraphKind::Head,
        (Some((op, _)), None) if few_ops && op.op_type == "conv" => GraphKind::Conv,
        (Some(_), None) if few_ops => GraphKind::Linear,
        (None, _) if few_ops && products == 1 => GraphKind::Matmul,
        (None, _) if few_ops && g.ops.iter().any(fused) => GraphKind::Attention,
        (Some(_), Some(_)) if few_ops => GraphKind::Few,
        (Some(_), Some(_)) => GraphKind::Layers,
        _ => GraphKind::Other,
    }
}

/// Tells whether a graph joins other shards: many other ops around few matrices, without attention and states. A
/// graph that ends in a matrix is a head.
fn is_glue(g: &Graph) -> bool {
    // A grouped convolution counts as one matrix per group. Ops that only move elements do not count.
    let matrices: usize = g.matrices().map(|(_, c)| c.groups.clamp(1, 1 << 16) as usize).sum();
    let moves = |op: &&Op| {
        matches!(op.op_type.as_str(), "transpose" | "reshape" | "expand_dims" | "squeeze" | "identity")
    };
    let others = g.ops.iter().filter(|op| op.contraction.is_none() && !moves(op)).count();
    let attends =
        |op: &Op| op.op_type == "softmax" || op.contraction.as_ref().is_some_and(|c| c.between_activations);
    let ends_in_matrix = g.ops.iter().rfind(|op| !moves(op)).is_some_and(|op| op.contraction.is_some());
    others >= 12
        && others >= 12 * matrices
        && !ends_in_matrix
        && !g.ops.iter().any(attends)
        && g.states.is_empty()
}

/// Tells whether a parameter decides the shape of a result.
fn decides_shape(op_type: &str, param: &str) -> bool {
    matches!(
        (op_type, param),
        ("slice_by_index", "begin" | "end" | "stride")
            | ("slice_update", "begin" | "end" | "stride")
            | ("slice_by_size", "begin" | "size")
            | ("range_1d", "start" | "end" | "step")
            | ("reshape" | "fill", "shape")
            | ("tile", "reps")
            | ("one_hot", "one_hot_vector_size")
            | ("topk", "k")
            | ("pad", "pad")
    )
}

fn shapes(described: &FunctionDescription) -> Shapes {
    let mut found = Shapes::Fixed;
    for feature in &described.inputs {
        match &feature.shape {
            FeatureShape::Fixed(_) => {}
            FeatureShape::Enumerated(_) | FeatureShape::Dynamic => return Shapes::Enumerated,
            FeatureShape::Range { ranges, .. } => {
                for (low, high) in ranges.iter().filter(|(low, high)| Some(*low) != *high) {
                    let sizes = high.map(|high| high.saturating_sub((*low).max(1)).saturating_add(1));
                    found = match (found, sizes) {
                        (Shapes::Ranged(None), _) | (_, None) => Shapes::Ranged(None),
                        (Shapes::Ranged(Some(a)), Some(b)) => Shapes::Ranged(Some(a.max(b))),
                        (_, Some(b)) => Shapes::Ranged(Some(b)),
                    };
                }
            }
        }
    }
    found
}
