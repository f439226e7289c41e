//! Parts of plans that all families share: names of functions, bindings.

use crate::form::{FunctionForm, IoForm, ShardForm};
use crate::lower::last_name;
use crate::plan::{MatrixPlan, Packing, PlanOptions, PlannedShard, ScaleScope, count_name, package_name};
use crate::{Error, Result};
use anemoe_bundle::{
    Chain, InputBinding, OutputBinding, RowRange, Run, ShardFunction, ShardKind, Step, TokenCount,
};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Unit of a package of experts: a kind of function, which exists for each token count.
pub struct ExpertUnit {
    /// Name without the token count; none where the package has one unit.
    pub name: Option<String>,
    /// Experts that the unit computes.
    pub experts: Range<usize>,
    /// True if the unit computes the layer's own part besides experts: it routes, or joins the layer's branches.
    pub has_own_part: bool,
}

/// Returns the experts of each call of a package whose experts begin at `first`.
pub fn calls(first: usize, packing: Packing) -> impl Iterator<Item = Range<usize>> {
    (first..first + packing.per_package).step_by(packing.per_call).map(move |e| e..e + packing.per_call)
}

/// Returns the units `e003` for each call of a package whose experts begin at `first`.
pub fn expert_units(first: usize, packing: Packing) -> impl Iterator<Item = ExpertUnit> {
    let unit = |experts: Range<usize>| (Some(format!("e{:03}", experts.start)), experts);
    calls(first, packing).map(unit).map(|(name, experts)| ExpertUnit { name, experts, has_own_part: false })
}

/// Register with the stream.
pub const HIDDEN: &str = "hidden";
/// Name of the only function of a package.
const ONLY_FUNCTION: &str = "main";

/// Names one of several functions: `t4`, `e003_t4`.
fn function_name(unit: &Option<String>, tokens: TokenCount) -> String {
    match unit {
        None => count_name(tokens),
        Some(unit) => format!("{unit}_{}", count_name(tokens)),
    }
}

/// Makes the functions of a package: `main` where there is one, else one per unit and token count, `t4`, `e003_t4`,
/// `t1to4`.
pub fn functions(units: &[Option<String>], tokens: &[TokenCount]) -> Vec<ShardFunction> {
    let single = units.len() * tokens.len() == 1;
    let mut functions = Vec::new();
    for unit in units {
        for &t in tokens {
            let name = if single { ONLY_FUNCTION.to_string() } else { function_name(unit, t) };
            functions.push(ShardFunction { name, unit: unit.clone(), tokens: t, context: None });
        }
    }
    functions
}

/// Makes the functions of a shard of the sort `kind` with attention over a cache of `slots` slots. Those of `units`
/// for the whole context come first. Those of the unit `with_cache` for each context bucket follow: `t1_c512`,
/// `combine_t1_c512`.
pub fn attention_functions(
    options: &PlanOptions,
    kind: ShardKind,
    slots: usize,
    units: &[Option<String>],
    with_cache: &Option<String>,
) -> Vec<ShardFunction> {
    let contexts: Vec<usize> = options.form_of(kind).context_buckets.below(slots).collect();
    let mut all = functions(units, &options.tokens);
    if let (false, [only]) = (contexts.is_empty(), all.as_mut_slice()) {
        only.name = function_name(&only.unit, only.tokens);
    }
    for context in contexts {
        all.extend(options.tokens.iter().map(|&t| ShardFunction {
            name: format!("{}_c{context}", function_name(with_cache, t)),
            unit: with_cache.clone(),
            tokens: t,
            context: Some(context),
        }));
    }
    all
}

/// Binds an input to a whole register.
pub fn register(name: &str) -> InputBinding {
    InputBinding::Register { name: name.into(), rows: None, rescale: false }
}

/// Binds an input to a whole register in any power-of-two scale, for a function that normalizes it at once.
pub fn normalized(name: &str) -> InputBinding {
    InputBinding::Register { name: name.into(), rows: None, rescale: true }
}

/// Binds an input to channels `rows` of a register.
pub fn rows_of(name: &str, rows: RowRange) -> InputBinding {
    InputBinding::Register { name: name.into(), rows: Some(rows), rescale: false }
}

/// Binds an output that replaces a register.
pub fn output(register: &str) -> OutputBinding {
    OutputBinding { register: register.into(), rows: None, accumulate: false }
}

/// Makes the step that calls a unit of a shard of this form. Outputs have one column per token.
pub fn run(
    (shard, unit): (String, Option<String>),
    inputs: BTreeMap<String, InputBinding>,
    outputs: Vec<(String, OutputBinding)>,
    form: ShardForm,
) -> Run {
    let name = |name: String| match form.io {
        IoForm::ChannelsFirst => name,
        IoForm::ChannelsLast => last_name(&name),
    };
    Run {
        shard,
        others: Vec::new(),
        unit,
        when: None,
        inputs,
        outputs: outputs.into_iter().map(|(k, v)| (name(k), v)).collect(),
        kept: BTreeMap::new(),
        channels_last: form.io == IoForm::ChannelsLast,
    }
}

/// Names a package of whole layers: `L00.attn.mlp`, `L00to03.attn.mlp`.
pub fn layers_name(layers: &Range<usize>, parts: &str) -> String {
    match layers.len() {
        1 => format!("L{:02}.{parts}", layers.start),
        _ => format!("L{:02}to{:02}.{parts}", layers.start, layers.end - 1),
    }
}

/// Collects bindings by name.
pub fn named<T>(pairs: Vec<(&str, T)>) -> BTreeMap<String, T> {
    pairs.into_iter().map(|(k, v)| (k.to_string(), v)).collect()
}

/// Plans a matrix with the compression that the options choose for its part.
pub fn matrix(
    options: &PlanOptions,
    name: &str,
    part: &str,
    tensor: String,
    offset: u64,
    (rows, cols): (usize, usize),
) -> MatrixPlan {
    let quant = options.resolve(part, rows, cols);
    MatrixPlan {
        name: format!("{name}_weight"),
        part: part.into(),
        tensor,
        offset,
        rows,
        cols,
        taps: 1,
        bank: options.scale_scope == ScaleScope::Bank && part == "experts" && quant.kind.has_one_scale(),
        quant,
    }
}

/// Splits each shard whose form asks for it into one shard per token count, the first of which takes one token, and
/// lets the chain run them.
pub fn split_by_token_count(shards: Vec<PlannedShard>, chain: &mut Chain) -> Vec<PlannedShard> {
    let mut names: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut all = Vec::new();
    for shard in shards {
        let counts: BTreeSet<TokenCount> = shard.functions.iter().map(|f| f.tokens).collect();
        if shard.form.functions == FunctionForm::Shared || counts.len() == 1 {
            all.push(shard);
            continue;
        }
        for tokens in counts {
            let mut own = PlannedShard { name: package_name(&shard.name, tokens), ..shard.clone() };
            own.functions.retain(|f| f.tokens == tokens);
            if let [only] = own.functions.as_mut_slice() {
                only.name = ONLY_FUNCTION.into();
            }
            names.entry(shard.name.clone()).or_default().push(own.name.clone());
            all.push(own);
        }
    }
    for step in chain.steps.iter_mut().chain(&mut chain.head) {
        if let Step::Run(run) = step
            && let Some([first, others @ ..]) = names.get(&run.shard).map(Vec::as_slice)
        {
            (run.shard, run.others) = (first.clone(), others.to_vec());
        }
    }
    all
}

/// Returns the first expert of a planned shard, and the packing of its experts.
pub fn packing_of(shard: &PlannedShard) -> Result<(usize, Packing)> {
    match (shard.experts, shard.experts_per_call) {
        (Some((first, per_package)), Some(per_call)) => Ok((first, Packing { per_package, per_call })),
        _ => Err(not_ours(shard)),
    }
}

/// Makes the error for a shard that is none of the model's, a fault of the caller.
pub fn not_ours(shard: &PlannedShard) -> Error {
    Error::usage(format!("shard {} is not one of this model's", shard.name))
}
