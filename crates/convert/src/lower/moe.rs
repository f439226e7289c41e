//! Experts as a sum of branches, each multiplied by its routing weight.

use super::Lowering;
use anemoe_mlpackage::Result;
use anemoe_mlpackage::mil::builder::Var;

impl Lowering<'_> {
    /// Sum over `experts` of routing weight times gated MLP: `y` is `[1, H, 1, T]`, `routing` is
    /// `[1, experts.len(), 1, T]` in the same order, the result `[1, H, 1, T]`.
    ///
    /// One convolution pair per expert: the form in which all experts of a layer were on the ANE with tables (36 of 36
    /// convolutions of the ZAYA shard). The weight multiplies the activation before the down projection, so that a zero
    /// weight makes a zero input that an executor can see.
    pub fn experts(&mut self, name: &str, y: &Var, routing: &Var, experts: &[usize]) -> Result<Var> {
        let weights = match experts.len() {
            1 => vec![routing.clone()],
            n => self.f().split("routing", routing, n, 1)?,
        };
        let mut sum: Option<Var> = None;
        for (i, (expert, weight)) in experts.iter().zip(&weights).enumerate() {
            let n = |part: &str| format!("expert_{expert:03}_{part}");
            let gate_up = self.project(&n("gate_up"), y)?;
            let halves = self.f().split(&n("half"), &gate_up, 2, 1)?;
            let hidden = self.gated_gelu(&n("hidden"), &halves[0], &halves[1])?;
            let weighted = self.f().mul(&n("weighted"), &hidden, weight)?;
            let last = i + 1 == experts.len();
            let down = n("down");
            sum = Some(match sum {
                None if last => {
                    let down = self.project(&down, &weighted)?;
                    self.f().identity(name, &down)?
                }
                None => self.project(&down, &weighted)?,
                Some(sum) => {
                    let down = self.project(&down, &weighted)?;
                    let sum_name = if last { name.to_string() } else { n("sum") };
                    self.f().add(&sum_name, &sum, &down)?
                }
            });
        }
        sum.ok_or_else(|| anemoe_mlpackage::Error::InvalidProgram("a pack without experts".into()))
    }
}
