//! Predicted speed, for people.

use crate::ui::{self, Table};
use anemoe_bundle::ShardKind;
use anemoe_gates::cost::chips::ChipProfile;
use anemoe_gates::cost::drafts::{DrafterForecast, SpeculationForecast};
use anemoe_gates::cost::forecast::{Forecast, KindForecast, Span};
use anemoe_gates::cost::forms::{CostedForm, Recommendation};
use serde::Serialize;

/// A speed prediction as JSON.
#[derive(Serialize)]
pub struct SpeedDocument {
    /// Path of the checkpoint or bundle.
    pub source: String,
    /// Figures of the chip.
    pub profile: ChipProfile,
    /// Bytes that weights may fill.
    pub memory_bytes: f64,
    /// A pass of one token.
    pub one: Forecast,
    /// A pass of several tokens.
    pub several: Forecast,
    /// A pass of one token in each context for which there are functions.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub contexts: Vec<Forecast>,
    /// Speculation with passes of several tokens.
    pub speculation: SpeculationForecast,
    /// A drafter, and passes over its drafts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drafter: Option<DrafterForecast>,
    /// Forms of a checkpoint.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub forms: Vec<CostedForm>,
    /// The form to build, and the reasons.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recommended: Option<Recommendation>,
}

/// Formats a figure with its range.
fn span(s: &Span) -> String {
    let digits = if s.likely < 10.0 { 2 } else { 1 };
    format!("{:.digits$} ({:.digits$} to {:.digits$})", s.likely, s.low, s.high)
}

/// Shows passes of one token and of several, speculation, and forms.
pub fn show(document: &SpeedDocument, out: &mut Vec<String>) {
    let d = document;
    out.push(format!(
        "{} on {}: predicted from published figures, nothing is measured",
        d.source, d.profile.chip
    ));
    for f in [&d.one, &d.several] {
        show_pass(f, out);
        if d.several.tokens == 1 {
            break;
        }
    }
    if !d.contexts.is_empty() {
        out.push("\none token in a short context:".into());
        show_contexts(&d.contexts, &d.one, out);
    }
    if d.several.tokens > 1 {
        let gains: Vec<String> = d.speculation.gains.iter().map(|(p, g)| format!("{g:.2} at {p}")).collect();
        let is_expert = |k: &KindForecast| {
            matches!(k.kind, ShardKind::Experts | ShardKind::ExpertsCombine | ShardKind::Moe)
        };
        let measured = match d.several.kinds.iter().any(is_expert) {
            true => ". One model with several experts was measured at 4.4 times, which nothing here explains",
            false => "",
        };
        out.push(format!(
            "\na pass of {} tokens takes {:.2} times one of one token; with drafts, speed over plain decoding by the share that \
             is right: {}{measured}",
            d.speculation.tokens,
            d.speculation.over_one,
            gains.join(", ")
        ));
    }
    if let Some(drafter) = &d.drafter {
        show_drafter(drafter, out);
    }
    if !d.forms.is_empty() {
        out.push("\nforms, one token:".into());
        show_forms(&d.forms, out);
    }
    out.extend(d.recommended.as_ref().map(recommendation));
}

/// Formats the form to build, with a line for each reason.
pub fn recommendation(r: &Recommendation) -> String {
    let lines = r.reasons.iter().map(|reason| format!("\n  {reason}"));
    std::iter::once(format!("recommended: {}", r.form)).chain(lines).collect()
}

fn show_pass(f: &Forecast, out: &mut Vec<String>) {
    out.push(format!(
        "\n{}: {} ms, {} tokens a second; {:.1} calls, {} of packages, bound by {}",
        if f.tokens == 1 { "one token".into() } else { format!("{} tokens at once", f.tokens) },
        span(&f.ms),
        span(&f.tok_s),
        f.calls,
        ui::bytes(f.bundle_bytes as u64),
        f.bottleneck.name()
    ));
    let rows = f.kinds.iter().map(|k| {
        vec![
            k.kind.name().into(),
            format!("{:.1}", k.calls),
            ui::bytes(k.bytes as u64),
            ui::count(k.multiply_adds as u64),
            ui::bytes(k.cache_bytes as u64),
            span(&k.ms),
            k.bottleneck.name().into(),
        ]
    });
    let headings = ["kind", "calls", "bytes", "multiply-adds", "cache", "ms", "bound by"];
    out.extend(Table::new(&headings).with_rows(rows).lines());
}

/// Shows passes in contexts side by side, the whole context last.
fn show_contexts(contexts: &[Forecast], whole: &Forecast, out: &mut Vec<String>) {
    let rows = contexts.iter().chain([whole]).map(|f| {
        let positions = f.context.map_or("all".into(), |n| format!("up to {n}"));
        let cache: f64 = f.kinds.iter().map(|k| k.cache_bytes).sum();
        vec![positions, ui::bytes(cache as u64), span(&f.ms), span(&f.tok_s)]
    });
    out.extend(Table::new(&["positions", "cache", "ms", "tokens a second"]).with_rows(rows).lines());
}

/// Shows a drafter's call, and passes over its drafts by form.
fn show_drafter(d: &DrafterForecast, out: &mut Vec<String>) {
    out.push(format!("\ndrafter {}: {} ms for a drafted token", d.source, span(&d.ms)));
    let rows = d.forms.iter().flat_map(|form| {
        form.passes.iter().map(|pass| {
            vec![
                form.form.clone(),
                pass.drafted.to_string(),
                span(&pass.ms),
                format!("{:.2}", pass.over_one),
                pass.pays_from.map_or("never".into(), |share| format!("{:.0} %", 100.0 * share)),
            ]
        })
    });
    let headings = ["form", "drafted", "ms of the pass", "over one token, drafting included", "pays from"];
    out.extend(Table::new(&headings).with_rows(rows).lines());
}

/// Shows forms side by side.
fn show_forms(forms: &[CostedForm], out: &mut Vec<String>) {
    let rows = forms.iter().map(|f| {
        let v = &f.verdicts;
        let read: f64 = f.forecast.kinds.iter().map(|k| k.bytes).sum();
        vec![
            f.name.clone(),
            format!("{:.1}", f.forecast.calls),
            ui::bytes(read as u64),
            span(&f.forecast.ms),
            span(&f.forecast.tok_s),
            f.forecast.bottleneck.name().into(),
            format!("{} ane, {} unknown, {} not_ane", v.ane, v.unknown, v.not_ane),
        ]
    });
    let headings = ["form", "calls", "read", "ms", "tokens a second", "bound by", "placement"];
    out.extend(Table::new(&headings).with_rows(rows).lines());
}
