//! Experts as a sum of branches, each multiplied by its routing weight.

use super::{Activation, Lowering};
use crate::plan::bank_name;
use anemoe_mlpackage::Result;
use anemoe_mlpackage::mil::builder::{ConvParams, Var};

impl Lowering<'_> {
    /// Computes the sum over `experts` of routing weight times gated MLP, in the form in which the matrices are
    /// stored. `y` is `[1, H, 1, T]`, `routing` is `[1, experts, 1, T]`, and the result is `[1, H, 1, T]`.
    pub fn experts(
        &mut self,
        name: &str,
        y: &Var,
        routing: &Var,
        experts: &[usize],
        activation: Activation,
    ) -> Result<Var> {
        let bias = format!("{}_down_bias", bank_name(experts.first().copied().unwrap_or_default()));
        let has_bias = self.stored.has_vector(&self.stored_name(&bias));
        let plain = format!("{name}_unbiased");
        let own = if has_bias { plain.as_str() } else { name };
        let sum = match self.is_bank(experts) {
            true => self.expert_bank(own, y, routing, experts, activation)?,
            false => {
                let weights = self.split_axis_1("routing", routing, experts.len())?;
                self.separate_experts(own, y, &weights, experts, activation)?
            }
        };
        if has_bias { self.add_biases(name, &sum, routing, &bias) } else { Ok(sum) }
    }

    /// Adds to `sum`, `[1, H, 1, T]`, each expert's bias times its routing weight: a product of the stored biases
    /// `[1, 1, experts, H]` with `routing`, `[1, experts, 1, T]`.
    fn add_biases(&mut self, name: &str, sum: &Var, routing: &Var, bias: &str) -> Result<Var> {
        let n = |part: &str| format!("{name}_{part}");
        let t = self.tokens_or_inferred();
        let biases = self.vector(bias)?;
        let dims: Vec<i32> = biases.dims().iter().map(|d| d.fixed().unwrap_or_default() as i32).collect();
        let &[_, _, experts, h] = dims.as_slice() else {
            return Err(anemoe_mlpackage::Error::invalid_program("biases that are no matrix"));
        };
        let f = self.f();
        let weights = f.reshape(&n("routing_matrix"), routing, &[1, 1, experts, t])?;
        let product = f.matmul(&n("bias_matrix"), &biases, &weights, true, false)?;
        let bias = f.reshape(&n("bias"), &product, &[1, h, 1, t])?;
        f.add(name, sum, &bias)
    }

    /// Computes the sum of [`Lowering::experts`] where `routing` has one class more, behind the experts. The second
    /// result is the weight of this class, `[1, 1, 1, T]`.
    pub fn experts_and_skip(
        &mut self,
        name: &str,
        y: &Var,
        routing: &Var,
        experts: &[usize],
        activation: Activation,
    ) -> Result<(Var, Var)> {
        let n = experts.len();
        if self.is_bank(experts) {
            let parts = self.f().split_sizes("routing", routing, &[n as i32, 1], 1)?;
            let sum = self.expert_bank(name, y, &parts[0], experts, activation)?;
            return Ok((sum, parts[1].clone()));
        }
        let weights = self.split_axis_1("routing", routing, n + 1)?;
        let sum = self.separate_experts(name, y, &weights[..n], experts, activation)?;
        Ok((sum, weights[n].clone()))
    }

    fn is_bank(&self, experts: &[usize]) -> bool {
        let name = |e| self.stored_name(&format!("{}_gate_up_weight", bank_name(e)));
        experts.first().is_some_and(|&e| self.stored.has_matrix(&name(e)))
    }

    /// Computes the experts by one convolution pair each: in this form all experts of a layer with tables were on the
    /// ANE (36 of 36 convolutions of the ZAYA shard). The weight multiplies the activation before the down
    /// projection, so that a zero weight makes a zero input that an executor can see.
    fn separate_experts(
        &mut self,
        name: &str,
        y: &Var,
        weights: &[Var],
        experts: &[usize],
        activation: Activation,
    ) -> Result<Var> {
        let mut sum: Option<Var> = None;
        for (i, (expert, weight)) in experts.iter().zip(weights).enumerate() {
            let n = |part: &str| format!("expert_{expert:03}_{part}");
            let has_bias = self.stored.has_vector(&self.stored_name(&n("gate_up_bias")));
            let gate_up = self.project_with(&n("gate_up"), y, &n("gate_up"), has_bias)?;
            let halves = self.f().split(&n("half"), &gate_up, 2, 1)?;
            let hidden = self.gated(&n("hidden"), &halves[0], &halves[1], activation)?;
            let weighted = self.f().mul(&n("weighted"), &hidden, weight)?;
            // The last op carries the name of the whole sum.
            let last = i + 1 == experts.len();
            sum = Some(match sum {
                None => {
                    let result = if last { name.to_string() } else { n("down") };
                    self.project(&result, &weighted, &n("down"))?
                }
                Some(sum) => {
                    let down = self.project(&n("down"), &weighted, &n("down"))?;
                    let result = if last { name.to_string() } else { n("sum") };
                    self.f().add(&result, &sum, &down)?
                }
            });
        }
        sum.ok_or_else(|| anemoe_mlpackage::Error::invalid_program("a pack without experts"))
    }

    /// Computes all E experts, with F channels inside, by two convolutions:
    ///
    /// ```text
    /// y [1, H, 1, T] -> conv [2FE, H] -> [E, 2F, 1, T] -> act(gate) * up * routing [E, 1, 1, T]
    ///                -> [1, FE, 1, T] -> conv [HE, F] in E groups -> [1, E, H, T] -> sum over E
    /// ```
    /// The banks are those of the hand-made port (45056 x 704 for 16 experts of Gemma), which multiplied every expert's
    /// channels with the whole bank and kept the diagonal; groups compute that diagonal alone.
    fn expert_bank(
        &mut self,
        name: &str,
        y: &Var,
        routing: &Var,
        experts: &[usize],
        activation: Activation,
    ) -> Result<Var> {
        let prefix = bank_name(experts.first().copied().unwrap_or_default());
        let n = |part: &str| format!("{prefix}_{part}");
        let (e, t) = (experts.len() as i32, self.tokens_or_inferred());
        let h = y.dims().get(1).and_then(|d| d.fixed()).unwrap_or_default() as i32;
        let has_bias = self.stored.has_vector(&self.stored_name(&n("gate_up_bias")));
        let gate_up = self.project_with(&n("gate_up"), y, &n("gate_up"), has_bias)?;
        let wide = gate_up.dims().get(1).and_then(|d| d.fixed()).unwrap_or_default() as i32;
        let apart = self.f().reshape(&n("apart"), &gate_up, &[e, wide / e, 1, t])?;
        let halves = self.f().split(&n("half"), &apart, 2, 1)?;
        let hidden = self.gated(&n("hidden"), &halves[0], &halves[1], activation)?;
        let weights = self.f().reshape(&n("routing"), routing, &[e, 1, 1, t])?;
        let weighted = self.f().mul(&n("weighted"), &hidden, &weights)?;
        let joined = self.f().reshape(&n("joined"), &weighted, &[1, wide / 2, 1, t])?;
        let weight = self.matrix(&format!("{}_weight", n("down")))?;
        let groups = ConvParams { groups: e, ..ConvParams::default() };
        let down = self.f().conv(&n("down"), &joined, &weight, None, groups)?;
        let each = self.f().reshape(&n("each"), &down, &[1, e, h, t])?;
        let sum = self.f().reduce_sum(&n("sum"), &each, &[1], true)?;
        self.f().reshape(name, &sum, &[1, h, 1, t])
    }
}
