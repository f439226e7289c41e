//! `anemoe plan`

use crate::args::evidence::EvidenceArgs;
use crate::args::planning::{PlanArgs, PlanUse, PlannedCheckpoint, find_outliers, plan_checkpoint};
use crate::command::{Command, Page, to_value};
use crate::files::Overwrite;
use crate::show::placement::show_measured;
use crate::show::plan_table::{show, show_outliers, show_scales};
use crate::show::speed;
use crate::ui::Ui;
use anemoe_convert::lattice_report;
use anemoe_convert::models::Family;
use anemoe_convert::plan::{MatrixPlan, Plan, PlannedShard};
use anemoe_convert::shard_program::lower_without_weights;
use anemoe_gates::cost::chips::ChipProfile;
use anemoe_gates::cost::forecast::TokenCalls;
use anemoe_gates::cost::forms::{self, Recommendation, Setting};
use anemoe_gates::residency::imported::ImportedEvidence;
use anemoe_gates::residency::rule::Conditions;
use anemoe_gates::residency::{self, Report};
use anemoe_mlpackage::mil::Block;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

/// Show the packages that a checkpoint becomes: sizes, compression, predicted device.
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  anemoe plan synthetic:gemma4-26b-a4b --quant lut4 --experts-per-shard 16"
)]
pub struct Args {
    /// A Hugging Face folder, a .gguf file, hf:OWNER/NAME[@REV] from the hub, or synthetic:NAME?seed=N&layers=N.
    checkpoint: PathBuf,
    #[command(flatten)]
    options: PlanArgs,
    /// Write the whole plan as JSON to this file.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(flatten)]
    overwrite: Overwrite,
    #[command(flatten)]
    evidence: EvidenceArgs,
    /// Print every shard, not one of each kind.
    #[arg(long)]
    all: bool,
}

impl Command for Args {
    type Report = Page;

    fn run(self, ui: &Ui) -> anyhow::Result<Page> {
        if let Some(out) = &self.out {
            self.overwrite.output(out)?;
        }
        let PlannedCheckpoint { family, mut plan, importance, .. } =
            plan_checkpoint(&self.checkpoint, &self.options, PlanUse::Look, ui)?;
        plan.notes.extend(lattice_report::notes(&family, &plan, importance.as_ref())?);
        let outliers = find_outliers(&family, &plan, &self.options, ui)?;
        let evidence = self.evidence.outcomes()?;
        let options =
            residency::CheckOptions { evidence: evidence.clone(), ..residency::CheckOptions::default() };
        let placement = residency::plan(&family, &plan, &options)?;
        let recommended = recommend(&family, &plan, &self.evidence, evidence)?;
        if let Some(path) = &self.out {
            let mut text = serde_json::to_vec_pretty(&full_document(&plan, &placement)?)?;
            text.push(b'\n');
            anemoe_bundle::write_atomic(path, &text)?;
        }
        let rows = plan.shards.iter().zip(&placement.packages).zip(op_types(&family, &plan)?);
        let rows = rows.map(|((s, p), op_types)| {
            let functions: Vec<&str> = s.functions.iter().map(|f| f.name.as_str()).collect();
            json!({
                "name": s.name, "kind": s.kind, "layer": s.layer, "last_layer": s.last_layer, "functions": functions, "quant": s.quant,
                "weights": s.weights, "bytes": s.bytes, "verdict": p.verdict, "verdict_reason": p.deciding_rule(),
                "ops": p.functions.first().map(|f| f.ops), "op_types": op_types,
                "largest_matrix": s.matrices.iter().map(MatrixPlan::weights).max(),
            })
        });
        // Without matrices and chain, which `--out` writes.
        let document = json!({
            "family": plan.family, "source": plan.source, "options": plan.options, "shards": rows.collect::<Vec<_>>(),
            "totals": plan.totals, "verdict_reasons": placement.verdict_reasons(), "embedding": plan.embedding,
            "notes": plan.notes, "auto": plan.chain.auto, "outliers": outliers,
            "calls_per_token": TokenCalls::of(&plan.chain), "recommended": recommended,
        });
        let mut lines = Vec::new();
        show(&plan, &placement, self.all, &mut lines);
        show_measured(&placement, &mut lines);
        let found = Some(outliers.as_slice()).filter(|_| !self.options.skip_outliers);
        show_scales(&plan, found, &mut lines);
        show_outliers(&outliers, &mut lines);
        let says = |r: &Recommendation| {
            format!("on an M4 Max, as `anemoe predict-speed` says:\n{}", speed::recommendation(r))
        };
        lines.extend(recommended.as_ref().map(says));
        Ok(Page::new(document, lines))
    }
}

/// Ops of one function, by type.
type OpTypes = BTreeMap<String, u64>;

/// Counts the ops of every shard's first function, by type. Shards of one type have the same counts.
fn op_types(family: &Family, plan: &Plan) -> anyhow::Result<Vec<OpTypes>> {
    fn count(block: &Block, types: &mut OpTypes) {
        for op in &block.operations {
            *types.entry(op.op_type.clone()).or_default() += 1;
            op.blocks.iter().for_each(|b| count(b, types));
        }
    }
    let mut known: BTreeMap<String, OpTypes> = BTreeMap::new();
    let types = |shard: &PlannedShard| {
        let signature = shard.signature();
        if !known.contains_key(&signature) {
            let mut types = OpTypes::new();
            let program = lower_without_weights(family, shard)?.program;
            program.functions.values().take(1).for_each(|function| count(&function.block, &mut types));
            known.insert(signature.clone(), types);
        }
        Ok(known[&signature].clone())
    };
    plan.shards.iter().map(types).collect()
}

/// Chip and memory in GB for which speed is predicted: the machine on which the models were measured.
const MACHINE: (&str, f64) = ("m4-max", 48.0);

/// Recommends the packing and form that are predicted fastest on the Neural Engine.
fn recommend(
    family: &Family,
    plan: &Plan,
    folder: &EvidenceArgs,
    evidence: Option<Arc<ImportedEvidence>>,
) -> anyhow::Result<Option<Recommendation>> {
    let chip = ChipProfile::named(MACHINE.0).map_err(anyhow::Error::msg)?;
    let chip = folder.calibrated(&chip)?;
    let setting =
        Setting { chip: &chip, memory: MACHINE.1 * 1e9, conditions: Conditions::default(), evidence };
    Ok(forms::recommend(&forms::buildable(family, &plan.options, &setting), &plan.options))
}

/// Makes the document that `--out` writes: the plan, and the predicted device of each shard.
fn full_document(plan: &Plan, placement: &Report) -> anyhow::Result<serde_json::Value> {
    let mut document = to_value(plan)?;
    let shards = document["shards"].as_array_mut().into_iter().flatten();
    for (shard, p) in shards.zip(&placement.packages) {
        shard["verdict"] = p.verdict.name().into();
        shard["verdict_reason"] = p.deciding_rule().into();
    }
    Ok(document)
}
