//! Steps of a chain with names resolved to indices.

use super::call::{Call, CallFunctions, InputSource, RegisterSink};
use super::host::{self, Routing};
use super::vectors::{Mix, Norm, VectorFile};
use crate::backend::KeptRows;
use crate::{Error, Result};
use anemoe_bundle::{CHAIN_FILE, Chain, HostInput, InputBinding, Kept, OutputBinding, Step, TokenCount};
use std::collections::BTreeMap;
use std::path::Path;

/// The steps of a chain or of its head.
pub(super) struct ChainProgram {
    pub steps: Vec<ChainOp>,
    /// Token counts that every package has a function for.
    pub counts: Vec<TokenCount>,
    /// Host inputs that calls read.
    pub host: Vec<HostInput>,
}

pub(super) enum ChainOp {
    Zero {
        register: usize,
        channels: usize,
    },
    Route {
        logits: usize,
        weights: usize,
        routing: Routing,
    },
    Residual {
        stream: usize,
        branch: Option<usize>,
        mix: Mix,
    },
    Normalize {
        from: usize,
        to: usize,
        norm: Norm,
    },
    AddScaled {
        register: usize,
        from: usize,
        weights: usize,
        row: usize,
    },
    /// Calls that follow each other. Several calls add to one register that none of them reads.
    Calls(Vec<Call>),
}

/// Indices of registers by name.
#[derive(Default)]
pub(super) struct Names(BTreeMap<String, usize>);

impl Names {
    /// Returns the index of a name; a new name gets the next free index.
    pub fn index(&mut self, name: &str) -> usize {
        let next = self.0.len();
        *self.0.entry(name.to_string()).or_insert(next)
    }

    /// Returns the index of a known name.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.0.get(name).copied()
    }

    /// Returns the number of names.
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

impl ChainProgram {
    /// Resolves the names of `steps` to indices, and adds new names of registers to `names`.
    ///
    /// # Errors
    /// A vector that a step names is missing or not finite, or the shards have no function for one token in common.
    pub fn resolve(
        bundle: &Path,
        chain: &Chain,
        steps: &[Step],
        packages: &BTreeMap<String, usize>,
        vectors: &VectorFile,
        names: &mut Names,
    ) -> Result<ChainProgram> {
        let mut host_inputs: Vec<HostInput> = Vec::new();
        let mut counts: Option<Vec<TokenCount>> = None;
        let mut ops = Vec::new();
        // The last layer that an earlier call has reached.
        let mut reached: Option<usize> = None;
        // A register that is written in pieces has the rows of all of them.
        let mut sizes: BTreeMap<&str, usize> = BTreeMap::new();
        for step in steps {
            if let Step::Run(run) = step {
                for OutputBinding { register, rows, .. } in run.outputs.values() {
                    let end = rows.map_or(0, |r| r.start.saturating_add(r.count));
                    let size = sizes.entry(register).or_default();
                    *size = end.max(*size);
                }
            }
        }
        for step in steps {
            ops.push(match step {
                Step::Zero { register, channels } => {
                    ChainOp::Zero { register: names.index(register), channels: *channels }
                }
                Step::Route { logits, weights, top_k, scale, bias, over_all } => ChainOp::Route {
                    logits: names.index(logits),
                    weights: names.index(weights),
                    routing: Routing {
                        top_k: *top_k,
                        scale: scale.clone(),
                        bias: bias.clone(),
                        over_all: *over_all,
                    },
                },
                Step::Residual { stream, branch, vectors: name } => ChainOp::Residual {
                    stream: names.index(stream),
                    branch: branch.as_ref().map(|b| names.index(b)),
                    mix: vectors.mix(name, branch.is_some())?,
                },
                Step::Normalize { from, to, vector, eps } => ChainOp::Normalize {
                    from: names.index(from),
                    to: names.index(to),
                    norm: vectors.norm(vector, *eps)?,
                },
                Step::AddScaled { register, from, weights, row } => ChainOp::AddScaled {
                    register: names.index(register),
                    from: names.index(from),
                    weights: names.index(weights),
                    row: *row,
                },
                Step::Run(run) => {
                    // `Chain::read` has checked that the shard exists.
                    let package = packages[&run.shard];
                    let of_shard = |name: &str| {
                        let package = packages[name];
                        let own = chain.shards[package].functions.iter().filter(|f| f.unit == run.unit);
                        own.map(move |f| (f, (package, f.name.clone())))
                    };
                    let mut functions = CallFunctions::default();
                    for (f, function) in run.shards().flat_map(of_shard) {
                        functions.insert(f.context, f.tokens, function);
                    }
                    let whole = &functions.whole;
                    counts = Some(match counts {
                        None => whole.keys().copied().collect(),
                        Some(c) => c.into_iter().filter(|c| whole.contains_key(c)).collect(),
                    });
                    let mut source = |input: &InputBinding| match input {
                        InputBinding::Register { name, rows, rescale } => {
                            InputSource::Register { index: names.index(name), rows: *rows, rescale: *rescale }
                        }
                        InputBinding::Host(input) => {
                            let known = host_inputs.iter().position(|h| h == input);
                            InputSource::Host(known.unwrap_or_else(|| {
                                host_inputs.push(input.clone());
                                host_inputs.len() - 1
                            }))
                        }
                    };
                    let inputs: BTreeMap<String, InputSource> =
                        run.inputs.iter().map(|(k, v)| (k.clone(), source(v))).collect();
                    let axes = inputs.iter().filter_map(|(name, source)| {
                        let axis = match source {
                            // [1, C, 1, T]
                            InputSource::Register { .. } => Some(if run.channels_last { 2 } else { 3 }),
                            InputSource::Host(i) => host::token_axis(&host_inputs[*i]),
                            InputSource::Kept(_) => None,
                        };
                        Some((name.clone(), axis?))
                    });
                    let axes = axes.collect();
                    let outputs = run
                        .outputs
                        .iter()
                        .map(|(name, output)| {
                            let rows = output.rows.map(|r| (r, sizes[output.register.as_str()]));
                            let register = names.index(&output.register);
                            (name.clone(), RegisterSink { register, rows, accumulate: output.accumulate })
                        })
                        .collect();
                    let when = run.when.as_ref().map(|w| (names.index(&w.register), w.rows));
                    let own = &chain.shards[package];
                    let kept = run.kept.iter().filter_map(|(input, kept)| match kept.clone() {
                        Kept::Newest { rows, count, heads, channels, .. } => {
                            Some(KeptRows { input: input.clone(), rows, count, heads, channels })
                        }
                        Kept::Cache { .. } | Kept::Lent { .. } => None,
                    });
                    let call = Call {
                        shard: run.shard.clone(),
                        layer: own.layer,
                        begins: own.layer.filter(|layer| reached.is_none_or(|last| *layer > last)),
                        package,
                        when,
                        inputs,
                        outputs,
                        kept: kept.collect(),
                        functions,
                        axes,
                        channels_last: run.channels_last,
                        ..Call::default()
                    };
                    reached = reached.max(own.last_layer.or(own.layer));
                    ChainOp::Calls(vec![call])
                }
            });
        }
        let mut steps: Vec<ChainOp> = Vec::new();
        for op in ops {
            match (steps.last_mut(), op) {
                (Some(ChainOp::Calls(before)), ChainOp::Calls(next))
                    if next.iter().all(|n| n.is_like(&before[0])) =>
                {
                    before.extend(next);
                }
                (_, op) => steps.push(op),
            }
        }
        let counts = counts.unwrap_or_default();
        if !counts.iter().any(|c| c.min == 1) {
            let what = "chain: the shards have no function for one token in common";
            return Err(Error::invalid(bundle.join(CHAIN_FILE), what));
        }
        Ok(ChainProgram { steps, counts, host: host_inputs })
    }
}
