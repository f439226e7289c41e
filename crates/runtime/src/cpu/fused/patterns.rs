//! Patterns of operations that one node replaces: normalization, rotary embedding, gates, experts, attention; `update_pattern.rs`
//! has updates of caches.
//!
//! A pattern is found by its computation, not by names. It replaces its operations only if no other operation reads their
//! intermediate results.

use super::super::ir::{Instr, InstrKind, Projection, ValueRef};
use crate::tensor::{Data, Tensor};
use anemoe_kernels::{ActivationFunction, GELU_FP16, GateFunction, RmsNorm};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Instructions, in which every buffer is written once, with the writer and the readers of each buffer.
pub(super) struct InstrGraph<'a> {
    pub instructions: &'a [Instr],
    pub constants: &'a [Arc<Tensor>],
    /// Shape of each buffer.
    pub shapes: &'a [Vec<usize>],
    /// Step that writes each buffer.
    pub producer: Vec<Option<usize>>,
    /// Instructions that read each buffer, with repetition; `usize::MAX` for the function's results.
    pub readers: Vec<Vec<usize>>,
    /// True if every result of type fp16 is rounded.
    pub round: bool,
}

/// Fused form of a step, which also replaces instructions before it.
pub(super) enum Fused {
    Norm {
        x: ValueRef,
        axis: usize,
        norm: RmsNorm,
        weight: Option<ValueRef>,
    },
    /// `(x cos + swapped sin) factor`, where `swapped` is `x` with its first two pieces of `half` channels swapped.
    Rotate {
        x: ValueRef,
        cos: ValueRef,
        sin: ValueRef,
        half: usize,
        factor: f32,
    },
    Gated {
        gate: ValueRef,
        up: ValueRef,
        function: GateFunction,
    },
    Experts {
        branches: Vec<ExpertTerm>,
    },
    /// Attention with the result `[1, heads, T, head_dim]`.
    Attention {
        q: ValueRef,
        k: ValueRef,
        v: ValueRef,
        mask: ValueRef,
        kv_heads: usize,
        /// A score for each head that has no value.
        sinks: Option<Vec<f32>>,
    },
    Update {
        state: usize,
        new: ValueRef,
        keep: ValueRef,
        place: ValueRef,
        tail: Option<ValueRef>,
        /// Rows of the state before the tail; the update may cover only the first of these rows.
        slots: usize,
    },
}

/// A vector divided by a multiple of its largest magnitude: `x / (max|x| factor + floor)`.
struct Scaled {
    x: ValueRef,
    /// The divisor, `max|x| factor + floor`.
    scale: ValueRef,
    factor: f32,
    floor: f32,
    instructions: Vec<usize>,
}

/// One gated MLP times a weight per token.
#[derive(Clone)]
pub(super) struct ExpertTerm {
    pub x: ValueRef,
    /// Step of the gate and up projection.
    pub gate_up: usize,
    /// Bias of the gate and up projection.
    pub bias: Option<ValueRef>,
    /// Step of the down projection.
    pub down: usize,
    /// Constant with the biases of the down projections, `[1, 1, experts, channels]`, and the row of the expert.
    pub down_bias: Option<(usize, usize)>,
    /// `[1, of, 1, T]`
    pub weight: ValueRef,
    /// Index of the expert among the `of` experts of its matrices and weights; 0 of 1 where the expert has its own.
    pub place: usize,
    pub of: usize,
    pub function: GateFunction,
}

pub(super) type FusedSteps = Option<(Fused, Vec<usize>)>;

/// Converts a value that may be absent; returns `None` where there is one that does not convert.
pub(super) fn optional<T, R>(value: Option<T>, convert: impl FnOnce(T) -> Option<R>) -> Option<Option<R>> {
    value.map_or(Some(None), |v| convert(v).map(Some))
}

impl InstrGraph<'_> {
    fn step(&self, place: ValueRef) -> Option<usize> {
        match place {
            ValueRef::Buffer(b) => self.producer[b],
            _ => None,
        }
    }

    /// Returns the step that computes `place` by operation `op`.
    pub fn by(&self, place: ValueRef, op: &str) -> Option<usize> {
        self.step(place).filter(|&s| {
            self.instructions[s].op_type == op && matches!(self.instructions[s].work, InstrKind::Op { .. })
        })
    }

    pub fn arg(&self, step: usize, name: &str) -> Option<ValueRef> {
        self.instructions[step].argument(name)
    }

    fn out(&self, step: usize) -> Option<usize> {
        self.instructions[step].writes().first().copied()
    }

    pub fn shape(&self, place: ValueRef) -> Option<&[usize]> {
        match place {
            ValueRef::Buffer(b) => Some(&self.shapes[b]),
            ValueRef::Constant(c) => Some(&self.constants[c].shape),
            ValueRef::State(_) => None,
        }
    }

    pub fn constant(&self, place: ValueRef) -> Option<&Tensor> {
        if let ValueRef::Constant(c) = place { Some(&self.constants[c]) } else { None }
    }

    fn number(&self, place: ValueRef) -> Option<f32> {
        if let [v] = self.constant(place)?.as_f32()? { Some(*v) } else { None }
    }

    pub fn ints(&self, place: Option<ValueRef>) -> Option<&[i32]> {
        self.constant(place?)?.as_i32()
    }

    pub fn flag(&self, place: Option<ValueRef>, default: bool) -> Option<bool> {
        place.map_or(Some(default), |place| self.constant(place)?.as_bool()?.first().copied())
    }

    /// Returns the text of a constant, or `default` where there is none.
    pub fn text<'t>(&'t self, place: Option<ValueRef>, default: &'t str) -> Option<&'t str> {
        let Some(place) = place else { return Some(default) };
        if let Data::Str(text) = &self.constant(place)?.data { Some(text.first()?) } else { None }
    }

    /// Checks that a step is an operation `op`.
    fn require(&self, step: usize, op: &str) -> Option<()> {
        (self.instructions[step].op_type == op).then_some(())
    }

    /// Finds a matmul of operands of which `transposes` says which are transposed; returns its step and both.
    fn matmul(&self, place: ValueRef, transposes: (bool, bool)) -> Option<(usize, ValueRef, ValueRef)> {
        let s = self.by(place, "matmul")?;
        let flag = |name: &str| self.flag(self.arg(s, name), false);
        let fits = (flag("transpose_x")?, flag("transpose_y")?) == transposes;
        fits.then_some((s, self.arg(s, "x")?, self.arg(s, "y")?))
    }

    pub fn axis(&self, value: i32, rank: usize) -> Option<usize> {
        super::super::ops_axis(value, rank)
    }

    /// Tells whether the operand `axis` of a step is the constant `wanted`.
    fn is_along(&self, step: usize, wanted: usize, rank: usize) -> bool {
        let axis = self.ints(self.arg(step, "axis")).and_then(|v| self.axis(*v.first()?, rank));
        axis == Some(wanted)
    }

    /// Returns the operands of a commutative operation in both orders.
    pub fn both(&self, step: usize) -> Vec<(ValueRef, ValueRef)> {
        match (self.arg(step, "x"), self.arg(step, "y")) {
            (Some(x), Some(y)) => vec![(x, y), (y, x)],
            _ => Vec::new(),
        }
    }

    /// Tells whether only `root` and the instructions `inside` read the results of the instructions `inside`.
    pub fn closed(&self, inside: &[usize], root: usize) -> bool {
        inside.iter().all(|&s| {
            let mut written = self.instructions[s].writes().into_iter();
            written.all(|b| self.readers[b].iter().all(|r| *r == root || inside.contains(r)))
        })
    }

    /// Finds a reduction over one axis that keeps its dimensions; returns its step, axis and operand.
    fn reduction(&self, place: ValueRef, op: &str) -> Option<(usize, usize, ValueRef)> {
        let s = self.by(place, op)?;
        let x = self.arg(s, "x")?;
        let rank = self.shape(x)?.len();
        let &[axis] = self.ints(self.arg(s, "axes"))? else { return None };
        let keep = self.flag(self.arg(s, "keep_dims"), false)?;
        Some((s, self.axis(axis, rank)?, x)).filter(|_| keep)
    }

    fn square_of(&self, place: ValueRef) -> Option<(usize, ValueRef)> {
        if let Some(s) = self.by(place, "mul") {
            let (x, y) = (self.arg(s, "x")?, self.arg(s, "y")?);
            return (x == y).then_some((s, x));
        }
        if let Some(s) = self.by(place, "square") {
            return Some((s, self.arg(s, "x")?));
        }
        let s = self.by(place, "pow")?;
        (self.number(self.arg(s, "y")?)? == 2.0).then_some((s, self.arg(s, "x")?))
    }

    /// Finds `x / sqrt(mean(x^2) + eps)`, also with `x` divided by its largest magnitude first.
    pub fn norm(&self, root: usize) -> FusedSteps {
        self.require(root, "mul")?;
        self.both(root).into_iter().find_map(|(scaled, inverse)| {
            let mut inside = Vec::new();
            let r = self.by(inverse, "rsqrt")?;
            inside.push(r);
            let root_eps = self.arg(r, "epsilon").map_or(Some(1e-12), |e| self.number(e))?;
            let (under, least) = match self.by(self.arg(r, "x")?, "maximum") {
                Some(m) => {
                    inside.push(m);
                    self.both(m).into_iter().find_map(|(v, least)| Some((v, self.number(least)?)))?
                }
                None => (self.arg(r, "x")?, 0.0),
            };
            let mean = |place: ValueRef| -> Option<(usize, usize, usize)> {
                let (m, axis, squares) = self.reduction(place, "reduce_mean")?;
                let (s, x) = self.square_of(squares)?;
                (x == scaled).then_some((m, s, axis))
            };
            let (sum, (m, s, axis), more) = match mean(under) {
                Some(found) => (None, found, None),
                None => {
                    let sum = self.by(under, "add")?;
                    let (found, more) = self.both(sum).into_iter().find_map(|(a, b)| Some((mean(a)?, b)))?;
                    (Some(sum), found, Some(more))
                }
            };
            inside.extend(sum);
            inside.extend([m, s]);
            let plain = RmsNorm { eps: root_eps, relative_eps: 0.0, relative_least: 0.0, floor: 0.0 };
            let (x, norm) = match (more, more.and_then(|v| self.number(v))) {
                (Some(_), Some(eps)) if least == 0.0 => (scaled, RmsNorm { eps: eps + root_eps, ..plain }),
                (Some(_), Some(_)) => return None,
                (more, None) => match self.scaled(scaled, axis) {
                    Some(Scaled { x, scale, factor, floor, instructions }) => {
                        inside.extend(instructions);
                        let unit = factor * factor;
                        let eps = match more {
                            None => 0.0,
                            // (root_eps / scale)^2
                            Some(more) => {
                                let (q, base) = self.square_of(more)?;
                                let d = self.by(base, "real_div")?;
                                let eps = self.number(self.arg(d, "x")?)?;
                                if self.arg(d, "y")? != scale {
                                    return None;
                                }
                                inside.extend([q, d]);
                                eps * eps
                            }
                        };
                        let (relative_eps, relative_least) = (root_eps * unit, least * unit);
                        (x, RmsNorm { eps, relative_eps, relative_least, floor: floor / factor })
                    }
                    None if more.is_none() && least == 0.0 => (scaled, plain),
                    None => return None,
                },
                (None, Some(_)) => return None,
            };
            self.closed(&inside, root).then_some((Fused::Norm { x, axis, norm, weight: None }, inside))
        })
    }

    /// Finds `x / (max|x| factor + floor)`, also without a factor.
    fn scaled(&self, place: ValueRef, axis: usize) -> Option<Scaled> {
        let d = self.by(place, "real_div")?;
        let (x, scale) = (self.arg(d, "x")?, self.arg(d, "y")?);
        let sum = self.by(scale, "add")?;
        self.both(sum).into_iter().find_map(|(largest, floor)| {
            let floor = self.number(floor)?;
            let mut instructions = vec![d, sum];
            let (largest, factor) = match self.by(largest, "mul") {
                Some(p) => {
                    instructions.push(p);
                    self.both(p).into_iter().find_map(|(v, factor)| Some((v, self.number(factor)?)))?
                }
                None => (largest, 1.0),
            };
            let (m, of, magnitude) = self.reduction(largest, "reduce_max")?;
            let a = self.by(magnitude, "abs")?;
            instructions.extend([m, a]);
            let fits = of == axis && self.arg(a, "x")? == x && factor > 0.0;
            fits.then_some(Scaled { x, scale, factor, floor, instructions })
        })
    }

    /// Finds the product of a norm's result with a vector along its axis; returns its step and the vector.
    pub fn weighted(&self, root: usize, axis: usize) -> Option<(usize, ValueRef)> {
        let b = self.out(root)?;
        let &[reader] = self.readers[b].as_slice() else { return None };
        let step = self.instructions.get(reader)?;
        if step.op_type != "mul" {
            return None;
        }
        let n = self.shapes[b][axis];
        let rank = self.shapes[b].len();
        self.both(reader).into_iter().find_map(|(x, w)| {
            let shape = self.shape(w)?;
            let along =
                (0..shape.len()).all(|i| shape[i] == 1 || (i + rank == axis + shape.len() && shape[i] == n));
            let fits = x == ValueRef::Buffer(b) && matches!(w, ValueRef::Constant(_)) && along;
            (fits && shape.iter().product::<usize>() == n).then_some((reader, w))
        })
    }

    pub fn rotate(&self, root: usize) -> FusedSteps {
        self.require(root, "add")?;
        self.both(root).into_iter().find_map(|(straight, rotated)| {
            let (a, b) = (self.by(straight, "mul")?, self.by(rotated, "mul")?);
            self.both(b).into_iter().find_map(|(swapped, sin)| {
                let c = self.by(swapped, "concat")?;
                let pieces = self.instructions[c].values();
                let rank = self.shape(swapped)?.len();
                let split = self.by(*pieces.first()?, "split")?;
                let parts = self.instructions[split].writes();
                let order: Option<Vec<usize>> =
                    pieces.iter().map(|p| parts.iter().position(|b| *p == ValueRef::Buffer(*b))).collect();
                let x = self.arg(split, "x")?;
                let half = *self.shapes[parts[0]].last()?;
                let swaps = matches!(order?.as_slice(), [1, 0] | [1, 0, 2]) && parts.len() == pieces.len();
                let equal = *self.shapes[*parts.get(1)?].last()? == half;
                let along = |step| self.is_along(step, rank.wrapping_sub(1), rank);
                if !swaps || !equal || !along(c) || !along(split) {
                    return None;
                }
                let (_, cos) = self.both(a).into_iter().find(|(v, _)| *v == x)?;
                let inside = vec![a, b, c, split];
                let rotate = Fused::Rotate { x, cos, sin, half, factor: 1.0 };
                self.closed(&inside, root).then_some((rotate, inside))
            })
        })
    }

    /// Finds the product of a step's result with a number, its only reader; returns the product's step and the number.
    pub fn multiplied(&self, root: usize) -> Option<(usize, f32)> {
        let b = self.out(root)?;
        let &[reader] = self.readers[b].as_slice() else { return None };
        if self.instructions.get(reader)?.op_type != "mul" {
            return None;
        }
        let (_, factor) = self.with_number(ValueRef::Buffer(self.out(reader)?), "mul")?.1;
        (self.shapes[self.out(reader)?] == self.shapes[b]).then_some((reader, factor))
    }

    /// Finds an operation of a value and a number; returns its step, and both.
    fn with_number(&self, place: ValueRef, op: &str) -> Option<(usize, (ValueRef, f32))> {
        let s = self.by(place, op)?;
        self.both(s).into_iter().find_map(|(x, y)| Some((s, (x, self.number(y)?))))
    }

    /// Finds an activation; returns the instructions that compute it, its kind, and its input.
    fn gate_of(&self, place: ValueRef) -> Option<(Vec<usize>, ActivationFunction, ValueRef)> {
        let s = self.step(place)?;
        match self.activation(s) {
            Some(kind) => Some((vec![s], kind, self.arg(s, "x")?)),
            // With rounding, the parts of a product give other bits than one op.
            None if self.round => None,
            None => self.gate_by_sigmoid(place),
        }
    }

    /// Finds `x sigmoid(x)`, and `x sigmoid(x (a + b x^2))` with the factors of [`GELU_FP16`].
    fn gate_by_sigmoid(&self, place: ValueRef) -> Option<(Vec<usize>, ActivationFunction, ValueRef)> {
        let m = self.by(place, "mul")?;
        self.both(m).into_iter().find_map(|(x, part)| {
            let s = self.by(part, "sigmoid")?;
            let argument = self.arg(s, "x")?;
            if argument == x {
                return Some((vec![m, s], ActivationFunction::Silu, x));
            }
            let product = self.by(argument, "mul")?;
            let (_, slope) = self.both(product).into_iter().find(|(v, _)| *v == x)?;
            let sum = self.by(slope, "add")?;
            let (cubic, linear) = self.both(sum).into_iter().find_map(|(v, a)| Some((v, self.number(a)?)))?;
            let c = self.by(cubic, "mul")?;
            let (square, cubic) = self.both(c).into_iter().find_map(|(v, b)| Some((v, self.number(b)?)))?;
            let (q, of) = self.square_of(square)?;
            (of == x && [linear, cubic] == GELU_FP16).then_some((
                vec![m, s, product, sum, c, q],
                ActivationFunction::GeluFp16,
                x,
            ))
        })
    }

    /// Returns the kind of activation that a step computes.
    pub fn activation(&self, step: usize) -> Option<ActivationFunction> {
        match self.instructions[step].op_type.as_str() {
            "silu" => Some(ActivationFunction::Silu),
            "gelu" => ActivationFunction::of_gelu(self.text(self.arg(step, "mode"), "EXACT")?),
            _ => None,
        }
    }

    /// Finds `f(gate, up)`.
    pub fn gated(&self, root: usize) -> FusedSteps {
        self.require(root, "mul")?;
        let shape = &self.shapes[self.out(root)?];
        self.both(root).into_iter().find_map(|(activated, up)| {
            let (inside, function, gate, up) = match self.gate_of(activated) {
                Some((inside, kind, gate)) => (inside, GateFunction::Product(kind), gate, up),
                None => self.clamped_gate(activated, up)?,
            };
            let equal = self.shape(gate)? == shape && self.shape(up)? == shape;
            (equal && self.closed(&inside, root)).then_some((Fused::Gated { gate, up, function }, inside))
        })
    }

    /// Finds the factors of [`GateFunction::Clamped`]: `g sigmoid(steepness g)` and `u + 1`. Returns the instructions that
    /// compute them, the function, and the halves.
    fn clamped_gate(
        &self,
        activated: ValueRef,
        shifted: ValueRef,
    ) -> Option<(Vec<usize>, GateFunction, ValueRef, ValueRef)> {
        let (sum, (u, one)) = self.with_number(shifted, "add")?;
        let (largest, (u, least)) = self.with_number(u, "maximum")?;
        let (smallest, (up, most)) = self.with_number(u, "minimum")?;
        let product = self.by(activated, "mul")?;
        let (g, sigmoid, argument, steepness) = self.both(product).into_iter().find_map(|(g, part)| {
            let s = self.by(part, "sigmoid")?;
            let (m, (x, steepness)) = self.with_number(self.arg(s, "x")?, "mul")?;
            (x == g).then_some((g, s, m, steepness))
        })?;
        let (capped, (gate, limit)) = self.with_number(g, "minimum")?;
        let inside = vec![sum, largest, smallest, product, sigmoid, argument, capped];
        let fits = one == 1.0 && (most, least) == (limit, -limit);
        fits.then_some((inside, GateFunction::Clamped { limit, steepness }, gate, up))
    }

    /// Returns the input and the bias of a convolution that is a matmul over tokens in `groups` groups.
    fn tokenwise_in(&self, step: usize, groups: usize) -> Option<(ValueRef, Option<ValueRef>)> {
        match &self.instructions[step].work {
            InstrKind::Project { projection: Projection::Conv(conv), x, bias, .. }
                if conv.matmul_groups() == Some(groups) =>
            {
                Some((*x, *bias))
            }
            _ => None,
        }
    }

    /// Returns the input and the bias of a matmul over tokens; the bias is a constant.
    fn tokenwise(&self, step: usize) -> Option<(ValueRef, Option<ValueRef>)> {
        self.tokenwise_in(step, 1).filter(|(_, bias)| bias.is_none_or(|b| matches!(b, ValueRef::Constant(_))))
    }

    /// Returns the input of a matmul over tokens in `groups` groups, which has no bias.
    fn unbiased(&self, step: usize, groups: usize) -> Option<ValueRef> {
        self.tokenwise_in(step, groups).filter(|(_, bias)| bias.is_none()).map(|(x, _)| x)
    }

    /// Returns the input of a reshape from shape `from` to shape `to`, and adds the reshape to `inside`.
    fn reshaped(
        &self,
        place: ValueRef,
        from: &[usize],
        to: &[usize],
        inside: &mut Vec<usize>,
    ) -> Option<ValueRef> {
        let s = self.by(place, "reshape")?;
        let x = self.arg(s, "x")?;
        inside.push(s);
        (self.shape(x)? == from && self.shape(place)? == to).then_some(x)
    }

    /// Finds a split of axis 1 into the halves `gate` and `up`; returns its input and its step.
    fn halves(&self, gate: ValueRef, up: ValueRef) -> Option<(ValueRef, usize)> {
        let split = self.by(gate, "split")?;
        let parts = self.instructions[split].writes();
        let halves =
            matches!(parts.as_slice(), [a, b] if gate == ValueRef::Buffer(*a) && up == ValueRef::Buffer(*b));
        let equal = self.shape(gate)? == self.shape(up)?;
        (halves && equal && self.is_along(split, 1, 4)).then_some((self.arg(split, "x")?, split))
    }

    /// Finds an expert: `W_down (f(gate, up) * w)`, with `gate` and `up` the halves of `W_gate_up x + b`, and `w` per token.
    fn branch(&self, down: usize) -> Option<(ExpertTerm, Vec<usize>)> {
        let x = self.unbiased(down, 1)?;
        let product = self.by(x, "mul")?;
        self.both(product).into_iter().find_map(|(hidden, weight)| {
            let shape = self.shape(weight)?;
            let tokens = *self.shape(x)?.last()?;
            if shape != [1, 1, 1, tokens] {
                return None;
            }
            let m = self.by(hidden, "mul")?;
            let (Fused::Gated { gate, up, function }, mut inside) = self.gated(m)? else { return None };
            let (both, split) = self.halves(gate, up)?;
            let gate_up = self.step(both)?;
            let (x, bias) = self.tokenwise(gate_up)?;
            inside.extend([product, m, split, gate_up]);
            let term =
                ExpertTerm { x, gate_up, bias, down, down_bias: None, weight, place: 0, of: 1, function };
            self.closed(&inside, down).then_some((term, inside))
        })
    }

    /// Finds experts in banks: `sum over e of W_down_e (gated_e w_e)`, E experts with F inner channels; `root` is the last
    /// reshape.
    ///
    /// ```text
    /// x [1, H, 1, T] -> conv [2FE, H] -> [E, 2F, 1, T] -> gated * w [E, 1, 1, T] -> [1, FE, 1, T]
    ///                -> conv [HE, F] in E groups -> [1, E, H, T] -> reduce_sum -> [1, H, 1, T]
    /// ```
    fn bank(&self, root: usize) -> Option<(Vec<ExpertTerm>, Vec<usize>)> {
        self.require(root, "reshape")?;
        let &[1, rows, 1, tokens] = self.shapes[self.out(root)?].as_slice() else { return None };
        let mut inside = Vec::new();
        let sum = self.by(self.arg(root, "x")?, "reduce_sum")?;
        let each = self.arg(sum, "x")?;
        let &[1, of, own_rows, own_tokens] = self.shape(each)? else { return None };
        if self.ints(self.arg(sum, "axes"))? != [1] || (own_rows, own_tokens) != (rows, tokens) {
            return None;
        }
        let down = self.step(self.reshaped(
            each,
            &[1, of * rows, 1, tokens],
            &[1, of, rows, tokens],
            &mut inside,
        )?)?;
        let joined = self.unbiased(down, of)?;
        let &[1, channels, 1, _] = self.shape(joined)? else { return None };
        let width = channels.checked_div(of)?;
        let weighted =
            self.reshaped(joined, &[of, width, 1, tokens], &[1, channels, 1, tokens], &mut inside)?;
        let product = self.by(weighted, "mul")?;
        inside.extend([sum, down, product]);
        self.both(product).into_iter().find_map(|(hidden, weights)| {
            let mut inside = inside.clone();
            let weight = self.reshaped(weights, &[1, of, 1, tokens], &[of, 1, 1, tokens], &mut inside)?;
            let m = self.by(hidden, "mul")?;
            let (Fused::Gated { gate, up, function }, gated) = self.gated(m)? else { return None };
            let (apart, split) = self.halves(gate, up)?;
            let shapes = ([1, 2 * channels, 1, tokens], [of, 2 * width, 1, tokens]);
            let gate_up = self.step(self.reshaped(apart, &shapes.0, &shapes.1, &mut inside)?)?;
            let (x, bias) = self.tokenwise(gate_up)?;
            inside.extend(gated);
            inside.extend([m, split, gate_up]);
            let term =
                |place| ExpertTerm { x, gate_up, bias, down, down_bias: None, weight, place, of, function };
            self.closed(&inside, root).then(|| ((0..of).map(term).collect(), inside))
        })
    }

    /// Finds the biases of the down projections of `terms`, each times the term's weight; `place` is their sum. Returns the
    /// constant with the biases, and the instructions.
    ///
    /// ```text
    /// biases [1, 1, E, H]^T x (weights [1, E, 1, T] -> [1, 1, E, T]) -> [1, 1, H, T] -> [1, H, 1, T]
    /// ```
    fn down_biases(&self, place: ValueRef, terms: &[ExpertTerm]) -> Option<(usize, Vec<usize>)> {
        let &[1, rows, 1, tokens] = self.shape(place)? else { return None };
        let (of, mut inside) = (terms.len(), Vec::new());
        let matrix = self.reshaped(place, &[1, 1, rows, tokens], &[1, rows, 1, tokens], &mut inside)?;
        let (product, biases, weights) = self.matmul(matrix, (true, false))?;
        inside.push(product);
        let ValueRef::Constant(constant) = biases else { return None };
        if self.shape(biases)? != [1, 1, of, rows] {
            return None;
        }
        let weights = self.reshaped(weights, &[1, of, 1, tokens], &[1, 1, of, tokens], &mut inside)?;
        let own = |(i, term): (usize, &ExpertTerm)| match term.of {
            1 if of == 1 => term.weight == weights,
            1 => self.part_of(term.weight, i).is_some_and(|x| x == weights),
            all => (term.weight, term.place, all) == (weights, i, of),
        };
        terms.iter().enumerate().all(own).then_some((constant, inside))
    }

    /// Returns the value of which `place` is part `i` of a split along axis 1.
    fn part_of(&self, place: ValueRef, i: usize) -> Option<ValueRef> {
        let split = self.by(place, "split")?;
        let is_part = self.instructions[split].writes().get(i).map(|b| ValueRef::Buffer(*b)) == Some(place);
        (is_part && self.is_along(split, 1, 4)).then(|| self.arg(split, "x"))?
    }

    /// Finds sums of experts, by the step that computes the sum. With `in_order`, only sums that add one expert at a time.
    pub fn experts(&self, in_order: bool) -> BTreeMap<usize, (Fused, Vec<usize>)> {
        let mut sums: BTreeMap<usize, (Vec<ExpertTerm>, Vec<usize>)> = BTreeMap::new();
        for (i, step) in self.instructions.iter().enumerate() {
            if let Some((branch, inside)) = self.branch(i) {
                sums.insert(i, (vec![branch], inside));
                continue;
            }
            // A bank is summed at once: rounding after each expert would give other bits.
            if let Some(bank) = if in_order { None } else { self.bank(i) } {
                sums.insert(i, bank);
                continue;
            }
            let InstrKind::Op { .. } = &step.work else { continue };
            let (Some(x), Some(y)) = (self.arg(i, "x"), self.arg(i, "y")) else { continue };
            let (Some(a), Some(b)) = (self.step(x), self.step(y)) else { continue };
            let only_here = |s: usize| self.closed(&[s], i);
            if step.op_type == "add" && !in_order {
                let biased = [(a, y), (b, x)].into_iter().find_map(|(sum, other)| {
                    let (terms, _) = sums.get(&sum)?;
                    let (constant, inside) = self.down_biases(other, terms).filter(|_| only_here(sum))?;
                    self.closed(&inside, i).then_some((sum, constant, inside))
                });
                if let Some((sum, constant, more)) = biased
                    && let Some((mut terms, mut inside)) = sums.remove(&sum)
                {
                    let all = terms.iter_mut().enumerate();
                    all.for_each(|(row, term)| term.down_bias = Some((constant, row)));
                    inside.extend(more);
                    inside.push(sum);
                    sums.insert(i, (terms, inside));
                    continue;
                }
            }
            let input = |s: usize| sums.get(&s).map(|(b, _)| b[0].x);
            let same = input(a).is_some() && input(a) == input(b) && self.shape(x) == self.shape(y);
            if step.op_type == "add" && a != b && same && only_here(a) && only_here(b) {
                let count = |s: usize| sums.get(&s).map_or(0, |(branches, _)| branches.len());
                let (a, b) = if in_order && count(a) < count(b) { (b, a) } else { (a, b) };
                if in_order && count(b) > 1 {
                    continue;
                }
                let (Some((mut branches, mut inside)), Some(right)) = (sums.remove(&a), sums.remove(&b))
                else {
                    continue;
                };
                branches.extend(right.0);
                inside.extend(right.1);
                inside.extend([a, b]);
                sums.insert(i, (branches, inside));
            }
        }
        sums.into_iter().map(|(i, (branches, inside))| (i, (Fused::Experts { branches }, inside))).collect()
    }

    /// Returns the value before a reshape and adds the reshape to `inside`; returns the value itself if no reshape made it.
    fn before_reshape(&self, place: ValueRef, inside: &mut Vec<usize>) -> Option<ValueRef> {
        match self.by(place, "reshape") {
            Some(s) => {
                inside.push(s);
                self.arg(s, "x")
            }
            None => Some(place),
        }
    }

    /// Finds the softmax along an axis that makes `weights`, also beside one score more, which has no value. Returns the
    /// scores and the constant with this score; adds the instructions to `inside`.
    ///
    /// ```text
    /// m = max(max s, sink)      weights = e^(s - m) / (sum e^(s - m) + e^(sink - m))
    /// ```
    pub fn softmax(
        &self,
        weights: ValueRef,
        along: usize,
        inside: &mut Vec<usize>,
    ) -> Option<(ValueRef, Option<ValueRef>)> {
        if let Some(softmax) = self.by(weights, "softmax") {
            inside.push(softmax);
            return self.is_along(softmax, along, 4).then_some((self.arg(softmax, "x")?, None));
        }
        let quotient = self.by(weights, "real_div")?;
        let (powers, total) = (self.arg(quotient, "x")?, self.arg(quotient, "y")?);
        let exp = self.by(powers, "exp")?;
        let below = self.by(self.arg(exp, "x")?, "sub")?;
        let (scores, top) = (self.arg(below, "x")?, self.arg(below, "y")?);
        let larger = self.by(top, "maximum")?;
        let (max, sink) = self.both(larger).into_iter().find_map(|(largest, sink)| {
            let (max, axis, of) = self.reduction(largest, "reduce_max")?;
            ((axis, of) == (along, scores) && matches!(sink, ValueRef::Constant(_))).then_some((max, sink))
        })?;
        let added = self.by(total, "add")?;
        let (sum, part) = self.both(added).into_iter().find_map(|(sum, part)| {
            let (sum, axis, of) = self.reduction(sum, "reduce_sum")?;
            ((axis, of) == (along, powers)).then_some((sum, self.by(part, "exp")?))
        })?;
        let sink_below = self.by(self.arg(part, "x")?, "sub")?;
        inside.extend([quotient, exp, below, larger, max, added, sum, part, sink_below]);
        let fits = (self.arg(sink_below, "x")?, self.arg(sink_below, "y")?) == (sink, top);
        fits.then_some((scores, Some(sink)))
    }

    /// Finds grouped attention with a mask; `root` is the reshape to heads after the product with the values.
    pub fn attention(&self, root: usize) -> FusedSteps {
        self.require(root, "reshape")?;
        let out = self.shapes[self.out(root)?].clone();
        let &[1, heads, tokens, d] = out.as_slice() else { return None };
        let mut inside = Vec::new();
        let (mixed, weights, v) = self.matmul(self.arg(root, "x")?, (false, false))?;
        inside.push(mixed);
        let weights = self.before_reshape(weights, &mut inside)?;
        let (masked, sinks) = self.softmax(weights, 3, &mut inside)?;
        let sum = self.by(masked, "add")?;
        inside.push(sum);
        let slots = *self.shape(masked)?.last()?;
        if self.shape(masked)? != [1, heads, tokens, slots] {
            return None;
        }
        let sinks = optional(sinks, |sinks| {
            let by_head = self.shape(sinks)? == [1, heads, 1, 1];
            Some(self.constant(sinks).filter(|_| by_head)?.as_f32()?.to_vec())
        })?;
        let (scores, mask) =
            self.both(sum).into_iter().find(|(_, m)| self.shape(*m) == Some(&[1, 1, tokens, slots]))?;
        let raw = self.before_reshape(scores, &mut inside)?;
        let (product, grouped, k) = self.matmul(raw, (false, true))?;
        inside.push(product);
        let q = self.before_reshape(grouped, &mut inside)?;
        let &[1, kv_heads, k_slots, k_d] = self.shape(k)? else { return None };
        let rows = heads.checked_div(kv_heads)? * tokens;
        let fits = self.shape(q)? == [1, heads, tokens, d]
            && self.shape(v)? == [1, kv_heads, slots, d]
            && (k_slots, k_d) == (slots, d)
            && heads.is_multiple_of(kv_heads)
            && self.shape(grouped)? == [1, kv_heads, rows, d]
            && self.shape(raw)? == [1, kv_heads, rows, slots];
        let attention = Fused::Attention { q, k, v, mask, kv_heads, sinks };
        (fits && self.closed(&inside, root)).then_some((attention, inside))
    }

    /// Finds attention computed head by head, with the softmax over keys on the channel axis; `root` is the concat of heads.
    pub fn attention_per_head(&self, root: usize) -> FusedSteps {
        self.require(root, "concat")?;
        let &[1, heads, tokens, d] = self.shapes[self.out(root)?].as_slice() else { return None };
        let contexts = self.instructions[root].values();
        if !self.is_along(root, 1, 4) || contexts.len() != heads {
            return None;
        }
        let mut inside = Vec::new();
        let (mut keys, mut values, mut queries) = (Vec::new(), Vec::new(), Vec::new());
        let (mut shared_mask, mut sinks) = (None, Vec::new());
        for context in contexts {
            let (mixed, columns, value) = self.matmul(*context, (true, false))?;
            values.push(value);
            let weights = self.before_reshape(columns, &mut inside)?;
            let (masked, sink) = self.softmax(weights, 1, &mut inside)?;
            let &[1, slots, 1, own] = self.shape(masked)? else { return None };
            let sum = self.by(masked, "add")?;
            if own != tokens {
                return None;
            }
            sinks.extend(optional(sink, |sink| self.number(sink))?);
            // A reshape makes the scores, but not the mask.
            let (scores, mask) = self.both(sum).into_iter().find(|(v, m)| {
                self.by(*v, "reshape").is_some()
                    && self.shape(*m) == Some(&[1, slots, 1, tokens])
                    && shared_mask.is_none_or(|known| known == *m)
            })?;
            shared_mask = Some(mask);
            let raw = self.before_reshape(scores, &mut inside)?;
            let (product, key, query) = self.matmul(raw, (false, true))?;
            keys.push(key);
            queries.push(query);
            inside.extend([mixed, sum, product]);
        }
        let q = self.all_heads(&queries, 1, &mut inside)?;
        let slots = self.shape(*keys.first()?)?.get(2).copied()?;
        let mut apart = keys.clone();
        apart.dedup();
        let kv_heads = apart.len();
        let group = heads.checked_div(kv_heads).filter(|group| group * kv_heads == heads)?;
        let k = self.all_heads(&keys, group, &mut inside)?;
        let v = self.all_heads(&values, group, &mut inside)?;
        inside.sort_unstable();
        inside.dedup();
        let fits = self.shape(q)? == [1, heads, tokens, d]
            && self.shape(k)? == [1, kv_heads, slots, d]
            && self.shape(v)? == [1, kv_heads, slots, d]
            && self.shape(shared_mask?)? == [1, slots, 1, tokens];
        let mask = shared_mask?;
        let is_whole = sinks.is_empty() || sinks.len() == heads;
        let sinks = (!sinks.is_empty()).then_some(sinks);
        let attention = Fused::Attention { q, k, v, mask, kv_heads, sinks };
        (fits && is_whole && self.closed(&inside, root)).then_some((attention, inside))
    }

    /// Returns the value that `heads` are split from along axis 1, each head `repeats` times; adds the split to `inside`.
    fn all_heads(&self, heads: &[ValueRef], repeats: usize, inside: &mut Vec<usize>) -> Option<ValueRef> {
        let first = *heads.first()?;
        if heads.len() == repeats {
            return heads.iter().all(|h| *h == first).then_some(first);
        }
        let split = self.by(first, "split")?;
        let parts = self.instructions[split].writes();
        let in_order = heads.iter().enumerate().all(|(h, v)| {
            parts.get(h / repeats).is_some_and(|b| *v == ValueRef::Buffer(*b))
                && self.shape(*v).is_some_and(|s| s[1] == 1)
        });
        let fits = in_order && parts.len() * repeats == heads.len() && self.is_along(split, 1, 4);
        inside.push(split);
        fits.then(|| self.arg(split, "x"))?
    }
}
