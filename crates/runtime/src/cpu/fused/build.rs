//! Builds nodes from instructions.
//!
//! ```text
//! plan_builder   views, nodes and buffers so far
//! fused          several instructions as one node          matmuls    matmuls with weights
//! native         views, and ops with own loops      library    all other ops
//! buffers        memory of the values
//! ```

mod buffers;
mod library;
mod matmuls;
mod native;
mod pattern_nodes;
mod plan_builder;

use super::super::ir::{Instr, InstrKind, ValueRef};
use super::super::strided::{StridedLoops, dense_strides};
use super::FusedPlan;
use super::nodes::NodeKind;
use super::patterns::InstrGraph;
use super::update::caches;
use super::view::{Base, View};
use crate::tensor::Tensor;
use anemoe_mlpackage::mil::DataType;
use buffers::assign;
use plan_builder::PlanBuilder;
use std::sync::Arc;

/// Input of planning: a function's instructions, in which every buffer is written once.
#[derive(Clone)]
pub(in crate::cpu) struct PlanInput {
    pub instructions: Vec<Instr>,
    pub constants: Vec<Arc<Tensor>>,
    /// Shape of each buffer.
    pub shapes: Vec<Vec<usize>>,
    /// Type of each buffer.
    pub types: Vec<DataType>,
    /// Buffer of each input.
    pub inputs: Vec<usize>,
    pub outputs: Vec<ValueRef>,
    pub states: Vec<Vec<usize>>,
    pub skip_zero: bool,
    /// Round every result of type fp16.
    pub round: bool,
}

/// Makes a plan; none where something has no fixed form: the instructions are then executed as they are.
pub(in crate::cpu) fn plan(source: &PlanInput) -> Option<FusedPlan> {
    let PlanInput { instructions, constants, shapes, types, inputs, outputs, states, skip_zero, round } =
        source;
    let (skip_zero, round) = (*skip_zero, *round);
    let mut producer = vec![None; shapes.len()];
    let mut readers = vec![Vec::new(); shapes.len()];
    for (i, step) in instructions.iter().enumerate() {
        step.writes().into_iter().for_each(|b| producer[b] = Some(i));
        step.reads().into_iter().for_each(|b| readers[b].push(i));
    }
    for place in outputs {
        if let ValueRef::Buffer(b) = place {
            readers[*b].push(usize::MAX);
        }
    }
    let g = InstrGraph { instructions, constants, shapes, producer, readers, round };
    let mut b = PlanBuilder {
        views: vec![None; shapes.len()],
        types,
        round,
        nodes: Vec::new(),
        sizes: Vec::new(),
        packed: 0,
        tensors: 0,
        matmuls: Vec::new(),
        convs: Vec::new(),
        step: 0,
        states,
        g,
    };
    for (i, &buffer) in inputs.iter().enumerate() {
        let view = View::dense(Base::Input(i), &shapes[buffer]);
        b.views[buffer] =
            Some(if round && types[buffer] == DataType::Float16 { b.rounded_input(&view) } else { view });
    }
    let (fused, inside) = b.fuse();
    for i in 0..instructions.len() {
        b.step = i;
        if inside[i] {
            continue;
        }
        match fused.get(&i) {
            Some(f) => b.fused(f)?,
            None => b.single()?,
        }
    }
    let mut results = Vec::new();
    for &place in outputs {
        let view = b.place(place)?;
        let dense = dense_strides(&view.shape);
        let loops = StridedLoops::new(&view.shape, [&dense, &view.strides], [0, view.offset]);
        results.push((loops, view));
    }
    let PlanBuilder { mut nodes, sizes, packed, tensors, .. } = b;
    let caches = caches(&nodes, states);
    let sizes = assign(&mut nodes, &sizes, &mut results);
    Some(FusedPlan {
        nodes,
        sizes,
        packed,
        tensors,
        constants: constants.to_vec(),
        caches,
        outputs: results,
        skip_zero,
        round,
        times: Vec::new(),
    })
}

impl PlanBuilder<'_> {
    fn single(&mut self) -> Option<()> {
        let step = &self.g.instructions[self.step];
        match &step.work {
            InstrKind::Cond { .. } | InstrKind::While { .. } | InstrKind::Call { .. } => None,
            InstrKind::Copy { from, .. } => {
                let view = self.place(*from)?;
                let copy = self.out_of_state(view);
                self.define(copy)
            }
            InstrKind::WriteState { state, data } => {
                let (state, data) = (*state, *data);
                if data == ValueRef::State(state) {
                    return Some(());
                }
                let x = self.float(data)?;
                self.before_write(state);
                let shape = self.states[state].clone();
                let loops = StridedLoops::new(&shape, [&dense_strides(&shape), &x.strides], [0, x.offset]);
                if x.shape != shape {
                    return None;
                }
                self.push(NodeKind::WriteState { state, loops, x: x.base });
                Some(())
            }
            InstrKind::Project { projection, x, bias, .. } => self.project(projection, *x, *bias),
            InstrKind::Op { .. } => match self.native() {
                Some(()) => Some(()),
                None => self.library_op(),
            },
        }
    }
}
