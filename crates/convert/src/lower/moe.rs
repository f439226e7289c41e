//! Experts as a sum of branches, each multiplied by its routing weight.

use super::{Activation, Lowering};
use anemoe_mlpackage::Result;
use anemoe_mlpackage::mil::builder::Var;

impl Lowering<'_> {
    /// Splits routing weights `[1, n, 1, T]` into n of `[1, 1, 1, T]`.
    pub fn routing_weights(&mut self, routing: &Var, n: usize) -> Result<Vec<Var>> {
        match n {
            1 => Ok(vec![routing.clone()]),
            n => self.f().split("routing", routing, n, 1),
        }
    }

    /// Sum over `experts` of routing weight times gated MLP: `y` is `[1, H, 1, T]`, `weights` are `[1, 1, 1, T]` in the same
    /// order, the result `[1, H, 1, T]`.
    ///
    /// One convolution pair per expert: the form in which all experts of a layer were on the ANE with tables (36 of 36
    /// convolutions of the ZAYA shard). The weight multiplies the activation before the down projection, so that a zero
    /// weight makes a zero input that an executor can see.
    pub fn experts(
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
            let gate_up = self.project(&n("gate_up"), y, &n("gate_up"))?;
            let halves = self.f().split(&n("half"), &gate_up, 2, 1)?;
            let hidden = self.gated(&n("hidden"), &halves[0], &halves[1], activation)?;
            let weighted = self.f().mul(&n("weighted"), &hidden, weight)?;
            // The last result of the chain carries the name of the whole.
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
}
