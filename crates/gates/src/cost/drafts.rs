//! Forecasts of speculation: passes over drafted tokens, and the time of a drafter.

use super::chips::ChipProfile;
use super::forecast::{Costed, Forecast, PassSize, Span, forecast, tokens_per_call, with_memory};
use anemoe_bundle::Chain;
use anemoe_runtime::speculate::break_even;
use serde::Serialize;

/// Acceptances of a drafted token for which gains are shown.
const ACCEPTANCE: [f64; 3] = [0.6, 0.8, 0.9];
/// Most drafted tokens of a pass that is shown.
pub const MOST_DRAFTED: usize = 7;

/// Speed with drafts over plain decoding.
#[derive(Serialize)]
pub struct SpeculationForecast {
    /// Tokens of a verifier call.
    pub tokens: usize,
    /// Time of a verifier call over the time of one token.
    pub over_one: f64,
    /// Speed over plain decoding, by the probability that a drafted token is right.
    pub gains: Vec<(f64, f64)>,
}

impl SpeculationForecast {
    /// Compares a pass of several tokens with one of one token.
    pub fn of(one: &Forecast, several: &Forecast) -> SpeculationForecast {
        let over_one = several.ms.likely / one.ms.likely;
        let gains = ACCEPTANCE.map(|p| (p, tokens_per_call(p, several.tokens - 1) / over_one)).to_vec();
        SpeculationForecast { tokens: several.tokens, over_one, gains }
    }
}

/// A drafter's call, and passes over its drafts by form.
#[derive(Serialize)]
pub struct DrafterForecast {
    /// Path of the checkpoint or bundle.
    pub source: String,
    /// Milliseconds for a drafted token.
    pub ms: Span,
    /// Forms of the model that it drafts for.
    pub forms: Vec<DraftedForm>,
}

/// Passes over drafts in a form.
#[derive(Serialize)]
pub struct DraftedForm {
    /// Options of the form.
    pub form: String,
    /// Milliseconds of a pass of one token.
    pub ms: Span,
    /// Passes over drafts.
    pub passes: Vec<DraftedPass>,
}

/// A pass over drafted tokens and one more.
#[derive(Serialize)]
pub struct DraftedPass {
    /// Drafted tokens.
    pub drafted: usize,
    /// Milliseconds of the pass.
    pub ms: Span,
    /// Time of the pass and of the drafter over that of a pass of one token.
    pub over_one: f64,
    /// Share of right tokens from which it pays; none where it never does.
    pub pays_from: Option<f64>,
}

impl DraftedForm {
    /// Forecasts passes over the drafts of a drafter that takes `drafter` milliseconds for a token, with `memory` bytes for
    /// weights.
    pub fn of(
        form: String,
        (chain, packages): (&Chain, &[Costed]),
        (chip, memory): (&ChipProfile, f64),
        drafter: &Span,
    ) -> DraftedForm {
        let pass = |n| with_memory(forecast(chain, packages, chip, PassSize::of(n)), chip, memory).ms;
        let one = pass(1);
        let drafted = |drafted: usize| {
            let ms = pass(drafted + 1);
            let over_one = (ms.likely + drafted as f64 * drafter.likely) / one.likely;
            DraftedPass { drafted, ms, over_one, pays_from: break_even(over_one, drafted) }
        };
        DraftedForm { form, ms: one, passes: (1..=MOST_DRAFTED).map(drafted).collect() }
    }
}
