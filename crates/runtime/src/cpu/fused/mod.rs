//! Functions of fixed shapes, compiled to a list of fused nodes over planned buffers.
//!
//! ```text
//! instructions (every buffer written once) --patterns--> groups of instructions that one node computes
//!                                   --build-----> nodes over views; reshapes, splits and transposes are views
//!                                   --run-------> nodes run one after the other; nothing is looked up by name
//! ```
//! Tokens lie one after the other with their channels together, for any axis order of the program. A token therefore goes through
//! the same code alone and in a batch. With [`super::Precision::Fp16`] nodes round their results, and give the same bits as
//! separate operations. Functions whose shapes are known only with their inputs: [`super::plans_by_shapes`]. Functions with
//! control flow: the operations in between are plans, see `super::compile::outline`.

mod build;
pub(super) mod experts;
mod inputs;
mod nodes;
mod op_call;
mod patterns;
mod rounded;
mod row_loops;
mod update;
mod update_pattern;
mod view;

use super::ops::OpError;
use super::ops::window::image_strides;
use super::ops::{OpResult, copy, map_all};
use super::state_value::StateValue;
use super::strided::{StridedLoops, copy_floats};
use crate::backend::{Counts, OpTime};
use crate::tensor::Tensor;
use anemoe_kernels::{
    AttentionShape, CacheValues, CacheView, DenseProducts, Finish, HeadStrides, Image, Isa, Mask, MatMul,
    PackedActivations, Pool, Pooling, Softmax, multiply_dense, pool_windows,
};
use anemoe_mlpackage::mil::TensorType;
use experts::{ExpertPack, SumTarget};
use inputs::NodeInputs;
use nodes::{Computation, Item, Node, NodeKind};
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use update::{Change, find_changes, update};
use view::{Base, View};

pub(super) use build::{PlanInput, plan};

/// A planned function.
pub(super) struct FusedPlan {
    nodes: Vec<Node>,
    /// Elements of each buffer.
    sizes: Vec<usize>,
    packed: usize,
    /// Number of tensors: results of library ops, and copies of their operands.
    tensors: usize,
    constants: Vec<Arc<Tensor>>,
    /// Slots of each state that may be held in fp16; none where the state has to be in f32.
    pub caches: Vec<Option<usize>>,
    /// Results of the function: each view, and the loops that copy it to a dense tensor.
    outputs: Vec<(StridedLoops<2>, View)>,
    skip_zero: bool,
    /// True if every result of type fp16 is rounded.
    round: bool,
    /// Nanoseconds that each node took in all runs; empty unless the plan is profiled.
    times: Vec<AtomicU64>,
}

/// Memory of the nodes of a call. The plans of a thread share one arena, because nothing in it outlives a call.
#[derive(Default)]
struct Arena {
    buffers: Vec<Vec<f32>>,
    packed: Vec<PackedActivations>,
    tensors: Vec<Tensor>,
    changes: Vec<Change>,
}

thread_local! {
    static ARENA: RefCell<Arena> = RefCell::default();
}

/// Frees this thread's arena; the next call allocates it again.
pub(super) fn release_memory() {
    drop(ARENA.take());
    experts::release_memory();
}

impl Arena {
    fn reserve(&mut self, sizes: &[usize], packed: usize, tensors: usize) {
        if self.buffers.len() < sizes.len() {
            self.buffers.resize_with(sizes.len(), Vec::new);
        }
        for (buffer, &n) in self.buffers.iter_mut().zip(sizes) {
            if buffer.len() < n {
                buffer.resize(n, 0.0);
            }
        }
        if self.packed.len() < packed {
            self.packed.resize_with(packed, PackedActivations::default);
        }
        if self.tensors.len() < tensors {
            self.tensors.resize_with(tensors, Tensor::default);
        }
    }
}

impl FusedPlan {
    /// Runs the function on checked inputs, writes its results to the first of `outputs`, and returns the work. `states` are
    /// in the function's order; allocations of `outputs` are kept.
    ///
    /// # Errors
    /// A node fails; the error holds its index.
    pub fn run(
        &self,
        inputs: &[&Tensor],
        states: &mut [StateValue],
        outputs: &mut [Tensor],
    ) -> Result<Counts, (OpError, usize)> {
        let mut arena = ARENA.take();
        arena.reserve(&self.sizes, self.packed, self.tensors);
        let result = self.run_in(&mut arena, inputs, states, outputs);
        ARENA.set(arena);
        result
    }

    fn run_in(
        &self,
        arena: &mut Arena,
        inputs: &[&Tensor],
        states: &mut [StateValue],
        outputs: &mut [Tensor],
    ) -> Result<Counts, (OpError, usize)> {
        let mut counts = Counts::default();
        for (at, node) in self.nodes.iter().enumerate() {
            let started = (!self.times.is_empty()).then(Instant::now);
            let run =
                PlanRun { constants: &self.constants, inputs, skip_zero: self.skip_zero, round: self.round };
            run_node(&node.work, arena, &run, states, &mut counts).map_err(|e| (e, at))?;
            for &(buffer, n) in &node.round {
                rounded::round(Pool::global(), &mut arena.buffers[buffer][..n]);
            }
            if let Some(started) = started {
                self.add_time(at, started.elapsed());
            }
        }
        let Arena { buffers, tensors, .. } = arena;
        let sources = NodeInputs { buffers, tensors, constants: &self.constants, inputs };
        for ((loops, view), out) in self.outputs.iter().zip(outputs) {
            match (view.base, sources.tensor(view.base)) {
                (Base::State(s), _) => states[s].copy_to(loops, out.reset_f32(&view.shape)),
                (_, Some(t)) if t.as_f32().is_none() => copy(t, &view.shape, out),
                (base, _) => copy_floats(loops, sources.get(base), out.reset_f32(&view.shape)),
            }
        }
        Ok(counts)
    }

    /// Adds the time of a run of a node.
    pub fn add_time(&self, node: usize, time: Duration) {
        if let Some(sum) = self.times.get(node) {
            sum.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
    }

    /// Returns the memory of a run in bytes: buffers, results of library ops, and outputs.
    pub fn bytes(&self) -> u64 {
        let ops = self.nodes.iter().filter_map(|node| match &node.work {
            NodeKind::Op(call) => Some(call.types.iter().filter_map(TensorType::elements)),
            _ => None,
        });
        let outputs = self.outputs.iter().map(|(_, view)| view.shape.iter().product::<usize>() as u64);
        let buffers = self.sizes.iter().map(|n| *n as u64);
        buffers.chain(ops.flatten()).chain(outputs).fold(0, |sum, n| n.saturating_mul(4).saturating_add(sum))
    }

    /// Returns the experts with the inputs of a call, if the function only computes their sum, `[1, channels, 1, tokens]` or
    /// `[1, 1, tokens, channels]`, with the channels of a token together. A function's sum that is rounded is none: a sum over
    /// packages is not.
    pub fn expert_pack<'a>(&'a self, inputs: &'a [&'a Tensor]) -> Option<ExpertPack<'a>> {
        let ([Node { work: NodeKind::Compute(Computation::Experts(e), out), .. }], [(_, view)]) =
            (self.nodes.as_slice(), self.outputs.as_slice())
        else {
            return None;
        };
        let (tokens, rows) = (e.tokens, e.rows);
        let whole = view.base == Base::Buffer(*out) && view.offset == 0;
        let lies = |shape: [usize; 4], channel: usize, token: usize| {
            let in_order =
                (rows == 1 || view.strides[channel] == 1) && (tokens == 1 || view.strides[token] == rows);
            view.shape == shape && in_order
        };
        let known = lies([1, rows, 1, tokens], 1, 3) || lies([1, 1, tokens, rows], 3, 2);
        let sources = NodeInputs { buffers: &[], tensors: &[], constants: &self.constants, inputs };
        let pack = ExpertPack { experts: e, sources, skip_zero: self.skip_zero, round: false };
        (whole && known && !self.round).then_some(pack)
    }

    /// Measures the time of each node from now on.
    pub fn profile(&mut self) {
        self.times = self.nodes.iter().map(|_| AtomicU64::new(0)).collect();
    }

    /// Returns the time of each operation in all runs; empty unless the plan is profiled.
    pub fn op_times(&self) -> Vec<OpTime> {
        let of = |(node, time): (&Node, &AtomicU64)| OpTime {
            op_type: node.op_type.clone(),
            name: node.name.clone(),
            time: Duration::from_nanos(time.load(Ordering::Relaxed)),
        };
        self.nodes.iter().zip(&self.times).map(of).collect()
    }

    /// Returns the operation type and the name of a node.
    pub fn describe(&self, node: usize) -> (&str, &str) {
        (&self.nodes[node].op_type, &self.nodes[node].name)
    }
}

/// Values and options of a run that all nodes read.
struct PlanRun<'a> {
    constants: &'a [Arc<Tensor>],
    inputs: &'a [&'a Tensor],
    skip_zero: bool,
    round: bool,
}

fn run_node(
    work: &NodeKind,
    arena: &mut Arena,
    run: &PlanRun<'_>,
    states: &mut [StateValue],
    counts: &mut Counts,
) -> OpResult<()> {
    let (pool, &PlanRun { constants, inputs, round, .. }) = (Pool::global(), run);
    let Arena { buffers, packed, tensors, changes } = arena;
    let sources = NodeInputs { buffers, tensors, constants, inputs };
    match work {
        NodeKind::MatMuls { fills, items } => {
            for fill in fills.iter() {
                let x = sources.columns(&fill.x, fill.strides);
                packed[fill.packed].pack(pool, fill.layout, x, fill.tokens, fill.channels);
            }
            *counts += matmuls(pool, items, buffers, packed, tensors, constants, inputs)?;
        }
        NodeKind::Update { state, new, keep, place, tail, slots, as_before } => {
            if !*as_before {
                find_changes(pool, &sources, (keep, place), new.shape[2], changes);
            }
            let values = (new, keep, place, tail.as_ref().map(|tail| (tail, *slots)));
            update(pool, &mut states[*state], &sources, values, changes, round);
        }
        NodeKind::WriteState { state, loops, x } => {
            // States that are written whole are not caches, see `caches`.
            if let StateValue::Full(t) = &mut states[*state] {
                copy_floats(loops, sources.get(*x), t.as_f32_mut().unwrap_or_default());
            }
        }
        NodeKind::Op(call) => {
            op_call::run(call, (buffers, tensors), (constants, inputs), states, round)?;
        }
        NodeKind::Compute(work, out) => {
            let mut y = std::mem::take(&mut buffers[*out]);
            let sources = NodeInputs { buffers, tensors, constants, inputs };
            let done = compute(work, &sources, states, run, &mut y);
            buffers[*out] = y;
            *counts += done?;
        }
    }
    Ok(())
}

/// Computes a buffer and returns the work.
fn compute(
    work: &Computation,
    sources: &NodeInputs<'_>,
    states: &[StateValue],
    run: &PlanRun<'_>,
    y: &mut [f32],
) -> OpResult<Counts> {
    let (pool, mut counts) = (Pool::global(), Counts::default());
    let get = |base: &Base| sources.get(*base);
    match work {
        Computation::Conv { conv, window, x, bias, then } => {
            let rows = conv.weight.rows();
            let bias = bias.map(|b| &sources.get(b)[..rows]);
            let finish =
                |at: usize, y: &mut [f32]| then.iter().for_each(|then| then.apply(sources, rows, at, y));
            let finish: Option<Finish<'_>> = if then.is_empty() { None } else { Some(&finish) };
            counts = conv.run(window, image(sources, x), y, bias, finish)?;
        }
        Computation::Pool { function, window, counts, x } => {
            let x = image(sources, x);
            pool_windows(pool, &Pooling { function: *function, window, counts, x }, y);
        }
        Computation::Gated { rows, n, gate, up, function } => {
            row_loops::apply_gates(pool, (rows, *n), (get(gate), get(up)), *function, y);
        }
        Computation::Norm { rows, n, x, weight, norm } => {
            row_loops::norms(pool, (rows, *n), get(x), weight.as_ref().map(get), *norm, y);
        }
        Computation::Rotate { rows, half, n, x, cos, sin, factor } => {
            row_loops::rotate(pool, (rows, *n), (*half, *factor), get(x), (get(cos), get(sin)), y);
        }
        Computation::Attention { shape, q, k, v, mask, sinks, out } => {
            let operands = AttentionOperands { shape, q: *q, kv: [k, v], mask, sinks: sinks.as_deref() };
            counts = attend(pool, sources, states, &operands, (y, *out), run.round);
        }
        Computation::Experts(experts) => {
            let pack = ExpertPack { experts, sources: *sources, skip_zero: run.skip_zero, round: run.round };
            experts::sum(&[pack], SumTarget::Written(y), std::slice::from_mut(&mut counts));
        }
        Computation::Binary { f, loops, x, y: other } => {
            loops.split(pool, y, 1, &|loops, y| f(loops, y, get(x), get(other)));
        }
        Computation::Unary { f, loops, x, n } => {
            let (x, y) = (get(x), &mut y[..*n]);
            match loops.contiguous() {
                Some(first) => map_all(&x[first..first + n], y, f),
                None => {
                    copy_floats(loops, x, y);
                    pool.for_chunks(y, MAPPED, &|_, y| f.apply(y));
                }
            }
        }
        Computation::Copy { loops, x, fill } => {
            if let Some((v, n)) = fill {
                y[..*n].fill(*v);
            }
            match x {
                Base::State(s) => states[*s].copy_to(loops, y),
                base => copy_floats(loops, get(base), y),
            }
        }
        Computation::Softmax { rows, n, step, x } => {
            row_loops::softmax(pool, (rows, *n), *step, get(x), y);
        }
        Computation::Reduce { f, loops, x } => f(loops, get(x), y),
        Computation::MatMul { places, sizes, x_stride, y_strides, x, y: other } => {
            let (sizes, x_stride, y_strides) = (*sizes, *x_stride, *y_strides);
            let (x, other) = (get(x), get(other));
            multiply_dense(pool, &DenseProducts { places, sizes, x_stride, y_strides, x, y: other }, y);
        }
    }
    Ok(counts)
}

/// Operands of an attention node.
struct AttentionOperands<'a> {
    shape: &'a AttentionShape,
    q: (Base, HeadStrides),
    /// Keys and values.
    kv: [&'a View; 2],
    mask: &'a (View, usize),
    sinks: Option<&'a [f32]>,
}

/// Computes attention into `out`. Returns what it read and multiplied.
fn attend(
    pool: &Pool,
    sources: &NodeInputs<'_>,
    states: &[StateValue],
    &AttentionOperands { shape, q, kv, mask, sinks }: &AttentionOperands<'_>,
    out: (&mut [f32], HeadStrides),
    is_rounded: bool,
) -> Counts {
    let cache = |v: &View| {
        let values = match v.base {
            Base::State(s) => states[s].values(),
            base => CacheValues::F32(sources.get(base)),
        };
        CacheView { values, first: v.offset, head_stride: v.strides[1], slot_stride: v.strides[2] }
    };
    let mask = Mask { values: &sources.get(mask.0.base)[mask.0.offset..], token_stride: mask.1 };
    let softmax = Softmax { scale: 1.0, mask: Some(mask), sinks };
    let [k, v] = kv.map(cache);
    let q = (sources.get(q.0), q.1);
    let bytes = match is_rounded {
        true => rounded::attention(pool, shape, (mask, sinks), q, &k, &v, out),
        false => anemoe_kernels::attention(pool, shape, softmax, q, &k, &v, out),
    };
    // Each key and value is multiplied by the queries of its group, for each token.
    let element = if matches!(k.values, CacheValues::F32(_)) { size_of::<f32>() } else { size_of::<u16>() };
    let queries = shape.tokens * (shape.heads / shape.kv_heads.max(1));
    Counts::product(bytes, bytes as usize / element, queries)
}

/// Returns a view `[batch, channels, spatial..]` as an image.
fn image<'a>(sources: &NodeInputs<'a>, x: &View) -> Image<'a> {
    Image {
        values: sources.get(x.base),
        first: x.offset,
        batch: x.shape[0],
        channels: x.shape[1],
        strides: image_strides(&x.strides),
    }
}

/// Elements that a thread computes in one part of a job of a function of one element.
const MAPPED: usize = 1 << 12;
/// Most matmuls of one job.
const MATMULS_PER_JOB: usize = 8;

/// Computes the matmuls of one node, at most [`MATMULS_PER_JOB`] as one job, and returns their work.
fn matmuls(
    pool: &Pool,
    items: &[Item],
    buffers: &mut [Vec<f32>],
    packed: &[PackedActivations],
    tensors: &[Tensor],
    constants: &[Arc<Tensor>],
    inputs: &[&Tensor],
) -> OpResult<Counts> {
    let mut counts = Counts::default();
    for items in items.chunks(MATMULS_PER_JOB) {
        let mut taken: [Vec<f32>; MATMULS_PER_JOB] = Default::default();
        for (item, taken) in items.iter().zip(&mut taken) {
            *taken = std::mem::take(&mut buffers[item.out]);
        }
        let sources = NodeInputs { buffers, tensors, constants, inputs };
        let mut all: [Option<MatMul<'_>>; MATMULS_PER_JOB] = Default::default();
        for ((item, y), product) in items.iter().zip(&mut taken).zip(&mut all) {
            let w = item.weight.matrix();
            counts += Counts::product(w.bytes_read(), packed[item.packed].tokens() * w.rows(), w.cols());
            let bias = item.bias.map(|b| &sources.get(b)[..w.rows()]);
            *product = Some(MatMul { w, x: &packed[item.packed], tokens: None, y, stride: w.rows(), bias });
        }
        anemoe_kernels::matmul_batch(Isa::best(), pool, &mut all);
        for (item, taken) in items.iter().zip(taken) {
            buffers[item.out] = taken;
        }
    }
    Ok(counts)
}
