//! Segments of a chain: the steps that lead from the residual stream before a layer to the results of one of its shards.

use anemoe_bundle::{Chain, InputBinding, OutputBinding, Run, ShardKind, Step};
use std::collections::BTreeSet;

/// Part of a chain that leads to one shard.
pub struct Segment {
    /// Chain with the steps of the segment only, and with the shards that they run.
    pub chain: Chain,
    /// Registers that have to be given besides `hidden`.
    pub seeds: Vec<String>,
    /// Registers that hold the shard's results at the end.
    pub outputs: Vec<String>,
}

/// Cuts out the steps that `shard` needs; other shards run only where the shard reads their results. Additions of
/// other packs of experts to the same sum are left out. Returns `None` where no step runs the shard.
pub fn segment(chain: &Chain, shard: &str) -> Option<Segment> {
    let planned = chain.shard(shard)?;
    let steps: &[Step] = match planned.kind {
        ShardKind::Head => &chain.head,
        _ => layer_steps(chain, planned.layer?),
    };
    let is_own = |step: &Step| matches!(step, Step::Run(run) if run.shard == shard);
    let last = steps.iter().rposition(is_own)?;
    // Sums that the host makes of the shard's results follow the shard's calls.
    let adds = steps[last + 1..].iter().take_while(|s| matches!(s, Step::AddScaled { .. })).count();
    let steps = &steps[..last + 1 + adds];
    let mut outputs = BTreeSet::new();
    for step in steps {
        match step {
            Step::Run(run) if run.shard == shard => {
                outputs.extend(run.outputs.values().map(|o| o.register.clone()));
            }
            Step::AddScaled { register, from, .. } if outputs.contains(from) => {
                outputs.insert(register.clone());
            }
            _ => {}
        }
    }
    let summed: BTreeSet<&String> = steps
        .iter()
        .filter_map(|s| if let Step::AddScaled { from, .. } = s { Some(from) } else { None })
        .collect();
    outputs.retain(|o| !summed.contains(o));

    let mut needed: BTreeSet<String> = outputs.clone();
    let mut kept = Vec::new();
    for step in steps.iter().rev() {
        if keep(step, shard, &mut needed) {
            kept.push(step.clone());
        }
    }
    kept.reverse();
    // Segments run one token at a time: packages for other token counts hold the same weights.
    for step in &mut kept {
        if let Step::Run(run) = step {
            run.others.clear();
        }
    }
    let run: BTreeSet<&str> = kept
        .iter()
        .filter_map(|s| if let Step::Run(run) = s { Some(run.shard.as_str()) } else { None })
        .collect();
    let shards = chain.shards.iter().filter(|s| run.contains(s.name.as_str())).cloned().collect();
    needed.remove("hidden");
    let seeds = needed.into_iter().filter(|r| kept.iter().any(|s| reads(s).contains(&r.as_str()))).collect();
    // A chain has to have a head; these steps stand in for it and never run as a head.
    let chain = Chain { head: kept.clone(), steps: kept, shards, ..chain.clone() };
    Some(Segment { chain, seeds, outputs: outputs.into_iter().collect() })
}

/// Returns the steps of a layer: from behind the last write to `hidden` before it, to the sums behind its last call.
fn layer_steps(chain: &Chain, layer: usize) -> &[Step] {
    let of_layer = |step: &Step| matches!(step, Step::Run(run) if chain.shard(&run.shard).is_some_and(|s| s.layer == Some(layer)));
    let first = chain.steps.iter().position(of_layer).unwrap_or(0);
    let end = chain.steps.iter().rposition(of_layer).map_or(0, |i| i + 1);
    let writes_stream = |step: &Step| match step {
        Step::Run(run) => run.outputs.values().any(|o| o.register == "hidden"),
        Step::Residual { stream, .. } => stream == "hidden",
        _ => false,
    };
    let start = chain.steps[..first].iter().rposition(writes_stream).map_or(0, |i| i + 1);
    let adds = chain.steps[end..].iter().take_while(|s| matches!(s, Step::AddScaled { .. })).count();
    &chain.steps[start..(end + adds).max(start)]
}

/// Returns the registers that a step reads.
fn reads(step: &Step) -> Vec<&str> {
    match step {
        Step::Zero { .. } => Vec::new(),
        Step::Route { logits, .. } => vec![logits],
        Step::Residual { stream, branch, .. } => {
            std::iter::once(stream).chain(branch).map(String::as_str).collect()
        }
        Step::Normalize { from, .. } => vec![from],
        Step::AddScaled { register, from, weights, .. } => vec![register, from, weights],
        Step::Run(run) => run_reads(run),
    }
}

fn run_reads(run: &Run) -> Vec<&str> {
    let inputs = run.inputs.values().filter_map(|i| match i {
        InputBinding::Register { name, .. } => Some(name.as_str()),
        InputBinding::Host(_) => None,
    });
    let sums = run.outputs.values().filter(|o| o.accumulate).map(|o| o.register.as_str());
    inputs.chain(sums).chain(run.when.as_ref().map(|w| w.register.as_str())).collect()
}

/// Tells whether a step has to run for `shard`'s results, once the later steps are decided. `needed` holds the
/// registers whose values are needed after the step, and on return those needed before it.
fn keep(step: &Step, shard: &str, needed: &mut BTreeSet<String>) -> bool {
    let (wanted, replaced): (bool, Vec<&str>) = match step {
        Step::Run(run) => {
            let whole = |o: &&OutputBinding| !o.accumulate && o.rows.is_none();
            let replaced: Vec<&str> =
                run.outputs.values().filter(whole).map(|o| o.register.as_str()).collect();
            let own = run.shard == shard;
            let read = run.outputs.values().any(|o| !o.accumulate && needed.contains(&o.register));
            (own || read, replaced)
        }
        Step::Zero { register, .. } => (needed.contains(register), vec![register]),
        Step::Route { weights, .. } => (needed.contains(weights), vec![weights]),
        Step::Normalize { to, .. } => (needed.contains(to), vec![to]),
        Step::Residual { stream, .. } => (needed.contains(stream), Vec::new()),
        Step::AddScaled { register, .. } => (needed.contains(register), Vec::new()),
    };
    if wanted {
        for register in replaced {
            needed.remove(register);
        }
        needed.extend(reads(step).into_iter().map(str::to_string));
    }
    wanted
}
