//! Lowers planned shards to MIL: blocks that all families share.
//!
//! The form (layout, inputs, states and why) is decided once for all families; `docs/ane-form.md` has the reasons.
//! Activations are `[1, C, 1, T]` between 1x1 convolutions and `[1, heads, T, head_dim]` inside attention, all fp16.

mod attention;
mod cca;
mod moe;
mod norm;
mod router;
mod store;

pub use attention::{
    AttentionDims, KV_CACHE, KV_PLACE, KV_ROWS, LENT_CACHE, LayerCache, PositionInputs, QueryInputs,
    SharedCache,
};
pub use cca::{CCA_HISTORY, HISTORY, HISTORY_ROWS, HistoryInput};
pub use norm::NormShape;
pub use store::{
    Stored, StoredMatrix, TRIANGLE, add_constant, element_type, encode_in_order, encode_matrix,
    join_operands, store_elements, store_matrix, store_triangle, store_vector, vector_values,
};

use crate::form::{ActivationForm, IoForm, ShardForm};
use anemoe_bundle::TokenCount;
use anemoe_mlpackage::Result;
use anemoe_mlpackage::mil::builder::{BuiltFunction, ConvParams, FunctionBuilder, GeluMode, Var};
use anemoe_mlpackage::mil::{DataType, Opset, TensorType, Value};
use half::f16;

/// Opset of every package: the first with states, several functions and grouped tables.
pub const OPSET: Opset = Opset::CoreML8;

/// Factor of x in the argument of the sigmoid that makes a GELU: 2 sqrt(2/pi).
const GELU_LINEAR: f32 = 1.595_769;
/// Factor of x^3 in the same argument: 0.044715 times [`GELU_LINEAR`].
const GELU_CUBIC: f32 = 0.071_354_82;
/// Factors of x, x^3 and x^5 for the exact GELU: the polynomial in fp16 whose sigmoid comes nearest to the normal
/// distribution up to [`GELU_EXACT_CAP`], found by search.
const GELU_EXACT: [f32; 3] = [1.594_726_6, 0.074_035_645, -0.000_703_334_8];
/// Largest x^2 that enters the polynomial: at x = 5 the sigmoid is 1 in fp16, and from x^2 = 52 on the polynomial
/// falls.
const GELU_EXACT_CAP: f32 = 25.0;

/// Names an output whose channels lie last: `hidden_out_last`.
pub fn last_name(output: &str) -> String {
    format!("{output}_last")
}

/// Function that gates an MLP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// The tanh form of GELU.
    GeluTanh,
    /// `x * sigmoid(x)`.
    Silu,
    /// `g sigmoid(steepness g) (u + 1)` with the gate g at most `limit` and the other half u within `limit` of zero.
    ClampedSilu {
        /// Largest gate, and largest magnitude of the other half.
        limit: f32,
        /// Factor in the sigmoid.
        steepness: f32,
    },
}

/// One function under construction over weights that are already stored in the package.
pub struct Lowering<'a> {
    f: FunctionBuilder,
    stored: &'a Stored,
    tokens: TokenCount,
    form: ShardForm,
    /// Prefix of the names of values and stored weights.
    scope: String,
}

impl<'a> Lowering<'a> {
    /// Starts a function for calls of `tokens` tokens.
    pub fn new(stored: &'a Stored, tokens: TokenCount, form: ShardForm) -> Self {
        Lowering { f: FunctionBuilder::new(OPSET), stored, tokens, form, scope: String::new() }
    }

    /// Sets the prefix of the names of values and stored weights from now on: a package with several layers has the
    /// same blocks for each layer.
    pub fn set_scope(&mut self, scope: &str) {
        self.scope = scope.to_string();
        self.f.set_scope(scope);
    }

    /// Returns the name of a stored weight in the scope.
    fn stored_name(&self, name: &str) -> String {
        format!("{}{name}", self.scope)
    }

    /// Returns the builder, for ops that no method of [`Lowering`] wraps.
    pub fn f(&mut self) -> &mut FunctionBuilder {
        &mut self.f
    }

    /// Returns the tokens of a call where fixed; -1 where ranged, for `reshape` to infer the dimension.
    fn tokens_or_inferred(&self) -> i32 {
        if self.tokens.min == self.tokens.max { self.tokens.max as i32 } else { -1 }
    }

    /// Tells whether the function takes exactly one token.
    fn is_single_token(&self) -> bool {
        self.tokens.max == 1
    }

    /// Declares an fp16 input, whose dimension `tokens_axis` is the number of tokens plus what `shape` has there.
    pub fn input(&mut self, name: &str, shape: &[u64], tokens_axis: Option<usize>) -> Result<Var> {
        let mut default = shape.to_vec();
        let Some(axis) = tokens_axis else {
            return self.f.input(name, TensorType::fixed(DataType::Float16, &default));
        };
        let more = default[axis];
        default[axis] += self.tokens.min as u64;
        if self.tokens.min == self.tokens.max {
            return self.f.input(name, TensorType::fixed(DataType::Float16, &default));
        }
        let mut ranges: Vec<(u64, u64)> = default.iter().map(|&n| (n, n)).collect();
        ranges[axis] = (self.tokens.min as u64 + more, self.tokens.max as u64 + more);
        self.f.input_ranged(name, DataType::Float16, &default, &ranges)
    }

    /// Declares an input with `channels` values per token, in the form's layout, and returns it as
    /// `[1, channels, 1, T]`.
    pub fn stream_input(&mut self, name: &str, channels: usize) -> Result<Var> {
        let c = channels as u64;
        match self.form.io {
            IoForm::ChannelsFirst => self.input(name, &[1, c, 1, 0], Some(3)),
            IoForm::ChannelsLast => {
                let last = self.input(name, &[1, 1, 0, c], Some(2))?;
                self.f.transpose(&format!("{name}_first"), &last, &[0, 3, 1, 2])
            }
        }
    }

    /// Adds a stored vector of fp16 values as a constant.
    pub fn vector(&mut self, name: &str) -> Result<Var> {
        let value = self.stored.vector(&self.stored_name(name))?;
        self.f.constant(name, value)
    }

    /// Adds a stored matrix as a dense fp16 convolution weight, `[rows, cols / taps, 1, taps]`.
    fn matrix(&mut self, name: &str) -> Result<Var> {
        let stored = self.stored.matrix(&self.stored_name(name))?;
        add_constant(&mut self.f, name, stored)
    }

    /// Adds a projection: the stored matrix `stored_weight` as a 1x1 convolution on `[1, cols, 1, T]`.
    pub fn project(&mut self, name: &str, x: &Var, stored: &str) -> Result<Var> {
        self.project_with(name, x, stored, false)
    }

    /// Adds a projection like [`Lowering::project`], where `has_bias` plus the stored vector `stored_bias`.
    pub fn project_with(&mut self, name: &str, x: &Var, stored: &str, has_bias: bool) -> Result<Var> {
        let weight = self.matrix(&format!("{stored}_weight"))?;
        let bias = if has_bias { Some(self.vector(&format!("{stored}_bias"))?) } else { None };
        self.f.conv(name, x, &weight, bias.as_ref(), ConvParams::default())
    }

    /// Computes GELU with the error function. The sigmoid form is `x sigmoid(x (a + s (b + c s)))` with
    /// `s = min(x^2, 25)`: within 0.00005 of the exact GELU, a tenth of the tanh form's difference. At the cap the
    /// sigmoid is 0 or 1.
    pub fn gelu_exact(&mut self, name: &str, x: &Var) -> Result<Var> {
        if self.form.activation == ActivationForm::Native {
            return self.f.gelu(name, x, GeluMode::Exact);
        }
        let n = |part: &str| format!("{name}_{part}");
        let [linear, cubic, fifth] = GELU_EXACT;
        let (a, b) = (self.scalar(&n("linear"), linear)?, self.scalar(&n("cubic"), cubic)?);
        let (c, cap) = (self.scalar(&n("fifth"), fifth)?, self.scalar(&n("cap"), GELU_EXACT_CAP)?);
        let f = &mut self.f;
        let square = f.mul(&n("square"), x, x)?;
        let square = f.minimum(&n("capped"), &square, &cap)?;
        let slope = f.mul(&n("bend"), &square, &c)?;
        let slope = f.add(&n("bends"), &slope, &b)?;
        let slope = f.mul(&n("slope"), &slope, &square)?;
        let slope = f.add(&n("slopes"), &slope, &a)?;
        let argument = f.mul(&n("argument"), &slope, x)?;
        let part = f.sigmoid(&n("sigmoid"), &argument)?;
        f.mul(name, x, &part)
    }

    /// Computes `activation(gate) * up`.
    pub fn gated(&mut self, name: &str, gate: &Var, up: &Var, activation: Activation) -> Result<Var> {
        let activated = match (activation, self.form.activation) {
            (Activation::ClampedSilu { limit, steepness }, _) => {
                return self.gated_in_limits(name, gate, up, (limit, steepness));
            }
            (Activation::GeluTanh, ActivationForm::Native) => {
                self.f.gelu(&format!("{name}_gelu"), gate, GeluMode::TanhApproximation)?
            }
            (Activation::Silu, ActivationForm::Native) => self.f.silu(&format!("{name}_silu"), gate)?,
            (Activation::GeluTanh, ActivationForm::Sigmoid) => self.gelu_by_sigmoid(name, gate)?,
            (Activation::Silu, ActivationForm::Sigmoid) => {
                let part = self.f.sigmoid(&format!("{name}_sigmoid"), gate)?;
                self.f.mul(&format!("{name}_silu"), gate, &part)?
            }
        };
        self.f.mul(name, &activated, up)
    }

    /// Computes [`Activation::ClampedSilu`].
    fn gated_in_limits(
        &mut self,
        name: &str,
        gate: &Var,
        up: &Var,
        (limit, steepness): (f32, f32),
    ) -> Result<Var> {
        let n = |part: &str| format!("{name}_{part}");
        let (most, least) = (self.scalar(&n("most"), limit)?, self.scalar(&n("least"), -limit)?);
        let (steepness, one) = (self.scalar(&n("steepness"), steepness)?, self.scalar(&n("one"), 1.0)?);
        let f = &mut self.f;
        let gate = f.minimum(&n("gate"), gate, &most)?;
        let steep = f.mul(&n("steep"), &gate, &steepness)?;
        let part = f.sigmoid(&n("sigmoid"), &steep)?;
        let activated = f.mul(&n("silu"), &gate, &part)?;
        let up = f.minimum(&n("up_most"), up, &most)?;
        let up = f.maximum(&n("up"), &up, &least)?;
        let up = f.add(&n("up_and_one"), &up, &one)?;
        f.mul(name, &activated, &up)
    }

    /// Computes the tanh form of GELU, `x sigmoid(x (a + b x^2))` with a = 2 sqrt(2/pi) and b = 0.044715 a. Where the
    /// square overflows, the sigmoid is 0 or 1 and the product is right.
    fn gelu_by_sigmoid(&mut self, name: &str, x: &Var) -> Result<Var> {
        let n = |part: &str| format!("{name}_{part}");
        let (b, a) = (self.scalar(&n("cubic"), GELU_CUBIC)?, self.scalar(&n("linear"), GELU_LINEAR)?);
        let f = &mut self.f;
        let square = f.mul(&n("square"), x, x)?;
        let slope = f.mul(&n("slope"), &square, &b)?;
        let slope = f.add(&n("slopes"), &slope, &a)?;
        let argument = f.mul(&n("argument"), &slope, x)?;
        let part = f.sigmoid(&n("sigmoid"), &argument)?;
        f.mul(&n("gelu"), x, &part)
    }

    /// Adds a constant of one fp16 element.
    pub fn scalar(&mut self, name: &str, value: f32) -> Result<Var> {
        self.f.constant(name, Value::fp16(f16::from_f32(value)))
    }

    /// Turns `[1, C, 1, T]` to the form's layout. With channels last the result is another value, named by
    /// [`last_name`].
    fn stream_output(&mut self, x: &Var) -> Result<Var> {
        match self.form.io {
            IoForm::ChannelsFirst => Ok(x.clone()),
            IoForm::ChannelsLast => self.f.transpose(&last_name(x.name()), x, &[0, 2, 3, 1]),
        }
    }

    /// Ends the function with outputs of one column for each token.
    pub fn finish_streams(self, outputs: &[&Var]) -> Result<BuiltFunction> {
        self.finish_attention(outputs, &[])
    }

    /// Ends the function with outputs of one column for each token, then rows that the host keeps as they are.
    pub fn finish_attention(mut self, outputs: &[&Var], rows: &[Var]) -> Result<BuiltFunction> {
        self.set_scope("");
        let mut all = Vec::new();
        for output in outputs {
            all.push(self.stream_output(output)?);
        }
        all.extend(rows.iter().cloned());
        self.finish(&all.iter().collect::<Vec<_>>())
    }

    /// Ends the function with these outputs, in this order. Each output's name is the name of its value.
    pub fn finish(mut self, outputs: &[&Var]) -> Result<BuiltFunction> {
        for output in outputs {
            self.f.output(output)?;
        }
        self.f.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computes the normal distribution function by Simpson's rule from 0.
    fn normal_distribution(x: f64) -> f64 {
        let density = |t: f64| (-0.5 * t * t).exp() / std::f64::consts::TAU.sqrt();
        let n = 400;
        let step = x / f64::from(n);
        let weight = |i: i32| if i == 0 || i == n { 1.0 } else { f64::from(2 + 2 * (i % 2)) };
        0.5 + step / 3.0 * (0..=n).map(|i| weight(i) * density(f64::from(i) * step)).sum::<f64>()
    }

    #[test]
    fn the_exact_gelu_by_sigmoid_is_near_the_exact_one() {
        let [a, b, c] = GELU_EXACT.map(|v| f16::from_f32(v).to_f64());
        let worst = (-2000..=2000).map(|i| {
            let x = f64::from(i) * 0.005;
            let s = (x * x).min(f64::from(GELU_EXACT_CAP));
            let argument = x * (a + s * (b + c * s));
            let by_sigmoid = x / (1.0 + (-argument).exp());
            (by_sigmoid - x * normal_distribution(x)).abs()
        });
        let worst = worst.fold(0.0, f64::max);
        assert!(worst < 5e-5, "{worst}");
    }
}
