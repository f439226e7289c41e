//! Steps of a chain with names resolved to indices.

use super::host::{self, Ranking, Routing};
use super::vectors::{Mix, Norm, Vectors};
use crate::backend::{BackendPackage, FunctionId};
use crate::cpu::MANY;
use crate::tensor::Tensor;
use crate::{Error, Result};
use anemoe_bundle::{CHAIN_FILE, Chain, HostInput, InputBinding, OutputBinding, RowRange, Step, TokenCount};
use smallvec::{SmallVec, smallvec};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// One more token in a call costs about this much of a call, on a device whose time goes into reading weights; it decides
/// between one padded call and several small ones.
const COST_PER_TOKEN: f64 = 0.05;

/// The function to call for `n` tokens that are left: the one that is cheapest per token.
pub(super) fn pick(counts: &[TokenCount], n: usize) -> TokenCount {
    let per_token = |c: &TokenCount| {
        let width = if c.min == c.max { c.max } else { n.min(c.max) };
        (1.0 + COST_PER_TOKEN * width as f64) / n.min(c.max) as f64
    };
    let best = counts.iter().copied().min_by(|a, b| per_token(a).total_cmp(&per_token(b)));
    best.unwrap_or(TokenCount { min: 1, max: 1 })
}

/// What `steps` or `head` of a chain become.
pub(super) struct Program {
    pub steps: Vec<Op>,
    /// Token counts for which every package has a function.
    pub counts: Vec<TokenCount>,
    /// Host inputs in use, each computed once per pass into `values`.
    pub host: Vec<HostInput>,
    pub values: Vec<Tensor>,
}

pub(super) enum Op {
    Zero {
        register: usize,
        channels: usize,
    },
    Route {
        logits: usize,
        weights: usize,
        routing: Routing,
        ranking: Ranking,
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
    /// Calls that follow each other; several where each adds to one register, that none of them reads.
    Calls(Vec<Call>),
}

/// A call of a package, by names; what they mean in a function is found when it is prepared.
pub(super) struct Call {
    shard: String,
    /// Layer of the shard.
    pub layer: Option<usize>,
    pub package: usize,
    pub when: Option<(usize, RowRange)>,
    inputs: BTreeMap<String, Source>,
    outputs: BTreeMap<String, Sink>,
    functions: BTreeMap<TokenCount, Function>,
}

struct Function {
    name: String,
    prepared: Option<Prepared>,
}

struct Prepared {
    id: FunctionId,
    /// In the order of the function's inputs.
    inputs: Vec<Source>,
    /// In the order of the function's outputs.
    outputs: Vec<Sink>,
    /// Inputs that are some rows of a register, or a register in another scale: copies, and whether this call takes them.
    scratch: Vec<(Tensor, bool)>,
}

#[derive(Clone, Copy)]
enum Source {
    Register { index: usize, rows: Option<RowRange>, rescale: bool },
    Host(usize),
}

#[derive(Clone, Copy)]
struct Sink {
    register: usize,
    /// First row, and rows of the whole register.
    rows: Option<(RowRange, usize)>,
    accumulate: bool,
}

/// Register names to indices.
#[derive(Default)]
pub(super) struct Names(BTreeMap<String, usize>);

impl Names {
    pub fn index(&mut self, name: &str) -> usize {
        let next = self.0.len();
        *self.0.entry(name.to_string()).or_insert(next)
    }

    pub fn find(&self, name: &str) -> Option<usize> {
        self.0.get(name).copied()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }
}

impl Program {
    pub fn resolve(
        bundle: &Path,
        chain: &Chain,
        steps: &[Step],
        packages: &BTreeMap<String, usize>,
        vectors: &Vectors,
        names: &mut Names,
    ) -> Result<Program> {
        let mut host: Vec<HostInput> = Vec::new();
        let mut counts: Option<Vec<TokenCount>> = None;
        let mut ops = Vec::new();
        // Registers that are written in pieces are as large as all of the pieces.
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
                    Op::Zero { register: names.index(register), channels: *channels }
                }
                Step::Route { logits, weights, top_k, scale, bias, over_all } => Op::Route {
                    logits: names.index(logits),
                    weights: names.index(weights),
                    routing: Routing {
                        top_k: *top_k,
                        scale: scale.clone(),
                        bias: bias.clone(),
                        over_all: *over_all,
                    },
                    ranking: Ranking::default(),
                },
                Step::Residual { stream, branch, vectors: name } => Op::Residual {
                    stream: names.index(stream),
                    branch: branch.as_ref().map(|b| names.index(b)),
                    mix: vectors.mix(name, branch.is_some())?,
                },
                Step::Normalize { from, to, vector, eps } => Op::Normalize {
                    from: names.index(from),
                    to: names.index(to),
                    norm: vectors.norm(vector, *eps)?,
                },
                Step::AddScaled { register, from, weights, row } => Op::AddScaled {
                    register: names.index(register),
                    from: names.index(from),
                    weights: names.index(weights),
                    row: *row,
                },
                Step::Run(run) => {
                    // `Chain::read` has checked that the shard exists.
                    let package = packages[&run.shard];
                    let functions: BTreeMap<TokenCount, Function> = chain.shards[package]
                        .functions
                        .iter()
                        .filter(|f| f.unit == run.unit)
                        .map(|f| (f.tokens, Function { name: f.name.clone(), prepared: None }))
                        .collect();
                    counts = Some(match counts {
                        None => functions.keys().copied().collect(),
                        Some(c) => c.into_iter().filter(|c| functions.contains_key(c)).collect(),
                    });
                    let mut source = |input: &InputBinding| match input {
                        InputBinding::Register { name, rows, rescale } => {
                            Source::Register { index: names.index(name), rows: *rows, rescale: *rescale }
                        }
                        InputBinding::Host(input) => {
                            let known = host.iter().position(|h| h == input);
                            Source::Host(known.unwrap_or_else(|| {
                                host.push(input.clone());
                                host.len() - 1
                            }))
                        }
                    };
                    let inputs = run.inputs.iter().map(|(k, v)| (k.clone(), source(v))).collect();
                    let outputs = run
                        .outputs
                        .iter()
                        .map(|(name, output)| {
                            let rows = output.rows.map(|r| (r, sizes[output.register.as_str()]));
                            let register = names.index(&output.register);
                            (name.clone(), Sink { register, rows, accumulate: output.accumulate })
                        })
                        .collect();
                    let when = run.when.as_ref().map(|w| (names.index(&w.register), w.rows));
                    let layer = chain.shards[package].layer;
                    Op::Calls(vec![Call {
                        shard: run.shard.clone(),
                        layer,
                        package,
                        when,
                        inputs,
                        outputs,
                        functions,
                    }])
                }
            });
        }
        let mut steps: Vec<Op> = Vec::new();
        for op in ops {
            match (steps.last_mut(), op) {
                (Some(Op::Calls(before)), Op::Calls(next)) if next.iter().all(|n| n.is_like(&before[0])) => {
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
        let values = vec![Tensor::default(); host.len()];
        Ok(Program { steps, counts, host, values })
    }
}

impl Call {
    /// Both add to one register, which they do not read, of one layer.
    fn is_like(&self, other: &Call) -> bool {
        let sum = |c: &Call| match c.outputs.values().collect::<Vec<_>>().as_slice() {
            [Sink { register, rows: None, accumulate: true }] => Some(*register),
            _ => None,
        };
        let reads = |c: &Call, register: usize| {
            let is = |s: &Source| matches!(s, Source::Register { index, .. } if *index == register);
            c.inputs.values().any(is) || c.when.as_ref().is_some_and(|(when, _)| *when == register)
        };
        let (Some(own), Some(others)) = (sum(self), sum(other)) else { return false };
        own == others && self.layer == other.layer && !reads(self, own) && !reads(other, own)
    }

    /// Name of the function for `count` tokens, if there is one.
    pub fn function(&self, count: TokenCount) -> Option<&str> {
        self.functions.get(&count).map(|f| f.name.as_str())
    }

    /// Loads the function for `count` tokens, if that has not happened yet.
    pub fn prepare(
        &mut self,
        packages: &mut [Box<dyn BackendPackage>],
        count: TokenCount,
        bundle: &Path,
    ) -> Result<()> {
        let shard = &self.shard;
        let wrong = |what: String| contradiction(bundle, shard, what);
        let function = self
            .functions
            .get_mut(&count)
            .ok_or_else(|| wrong(format!("no function for {} to {} tokens", count.min, count.max)))?;
        if function.prepared.is_some() {
            return Ok(());
        }
        let package = &mut packages[self.package];
        let id = package.prepare(&function.name)?;
        let mut inputs = Vec::new();
        for name in package.inputs(id) {
            let source =
                self.inputs.get(name).ok_or_else(|| wrong(format!("nothing is bound to input `{name}`")))?;
            inputs.push(*source);
        }
        if inputs.len() != self.inputs.len() {
            return Err(wrong(format!(
                "{} inputs are bound, the function has {}",
                self.inputs.len(),
                inputs.len()
            )));
        }
        let mut outputs = Vec::new();
        for name in package.outputs(id) {
            let sink =
                self.outputs.get(name).ok_or_else(|| wrong(format!("output `{name}` goes nowhere")))?;
            outputs.push(*sink);
        }
        if outputs.len() != self.outputs.len() {
            return Err(wrong(format!(
                "{} outputs are bound, the function has {}",
                self.outputs.len(),
                outputs.len()
            )));
        }
        let scratch = vec![(Tensor::default(), false); inputs.len()];
        function.prepared = Some(Prepared { id, inputs, outputs, scratch });
        Ok(())
    }

    /// Runs the function for `count` tokens on registers and host values, and writes its outputs to registers; `spares` are
    /// memory for them: functions of many tokens would hold gigabytes, each its own.
    pub fn run(
        &mut self,
        packages: &mut [Box<dyn BackendPackage>],
        registers: &mut [Tensor],
        (host, spares): (&[Tensor], &mut Vec<Tensor>),
        count: TokenCount,
        bundle: &Path,
    ) -> Result<()> {
        self.prepare(packages, count, bundle)?;
        let shard = &self.shard;
        let wrong = |what: String| contradiction(bundle, shard, what);
        let Some(Prepared { id, inputs, outputs, scratch }) =
            self.functions.get_mut(&count).and_then(|f| f.prepared.as_mut())
        else {
            return Err(wrong("its function is not prepared".into()));
        };
        gather(inputs, scratch, registers).map_err(wrong)?;
        let package = &mut packages[self.package];
        spares.resize_with(spares.len().max(outputs.len()), Tensor::default);
        for (i, spare) in spares.iter_mut().enumerate().take(outputs.len()) {
            package.lend(*id, i, std::mem::take(spare));
        }
        {
            let operands: Operands<'_> = operands(inputs, scratch, registers, host).collect();
            package.run(*id, &operands)?;
        }
        for (i, sink) in outputs.iter().enumerate() {
            let output = package.take(*id, i);
            let Some(values) = output.as_f32() else {
                return Err(wrong(format!("output {i} is not a float tensor")));
            };
            let register = &mut registers[sink.register];
            match sink.rows {
                None if !sink.accumulate => {
                    spares[i] = std::mem::replace(register, output);
                    continue;
                }
                None => match register.as_f32_mut() {
                    Some(sum) if sum.len() == values.len() => {
                        sum.iter_mut().zip(values).for_each(|(a, b)| *a += b);
                    }
                    _ => {
                        return Err(wrong(format!(
                            "output {i} does not fit the register that it is added to"
                        )));
                    }
                },
                Some((rows, channels)) => {
                    let width = output.shape.last().copied().unwrap_or(0);
                    if values.len() != rows.count * width {
                        return Err(wrong(format!(
                            "output {i} has shape {:?}, not {} rows",
                            output.shape, rows.count
                        )));
                    }
                    let all = register.reset_f32(&[1, channels, 1, width]);
                    all[rows.start * width..][..values.len()].copy_from_slice(values);
                }
            }
            spares[i] = output;
        }
        Ok(())
    }
}

fn contradiction(bundle: &Path, shard: &str, what: String) -> Error {
    Error::invalid(bundle.join(CHAIN_FILE), format!("chain: shard `{shard}`: {what}"))
}

/// Copies inputs that are some rows of a register, or a register in another scale.
fn gather(
    inputs: &[Source],
    scratch: &mut [(Tensor, bool)],
    registers: &[Tensor],
) -> std::result::Result<(), String> {
    for (source, (copy, taken)) in inputs.iter().zip(scratch.iter_mut()) {
        *taken = false;
        let Source::Register { index, rows, rescale } = source else { continue };
        let register = &registers[*index];
        let (width, values) =
            (register.shape.last().copied().unwrap_or(0), register.as_f32().unwrap_or_default());
        if let Some(rows) = rows {
            let range = rows.start * width..(rows.start + rows.count) * width;
            let values = values.get(range).ok_or_else(|| {
                format!("rows {}.. of a register of shape {:?}", rows.start, register.shape)
            })?;
            copy.reset_f32(&[1, rows.count, 1, width]).copy_from_slice(values);
            *taken = true;
        }
        if *rescale && host::is_large(if *taken { copy.as_f32().unwrap_or_default() } else { values }) {
            if !*taken {
                copy.reset_f32(&register.shape).copy_from_slice(values);
                *taken = true;
            }
            host::rescale(copy.as_f32_mut().unwrap_or_default(), width);
        }
    }
    Ok(())
}

/// What a call reads, behind [`gather`].
fn operands<'a>(
    inputs: &'a [Source],
    scratch: &'a [(Tensor, bool)],
    registers: &'a [Tensor],
    host: &'a [Tensor],
) -> impl Iterator<Item = &'a Tensor> {
    inputs.iter().zip(scratch).map(|(source, (copy, taken))| match source {
        _ if *taken => copy,
        Source::Register { index, .. } => &registers[*index],
        Source::Host(index) => &host[*index],
    })
}

type Operands<'a> = SmallVec<[&'a Tensor; MANY]>;
/// Of each call.
pub(super) type Times = SmallVec<[Duration; MANY]>;

/// Runs those of `calls`, which are alike, that are `wanted`, as one job where the backend can. Gives the time of
/// each, by what it has read; none, and nothing has been done, where it cannot.
pub(super) fn run_together(
    calls: &mut [Call],
    wanted: &[usize],
    packages: &mut [Box<dyn BackendPackage>],
    registers: &mut [Tensor],
    host: &[Tensor],
    count: TokenCount,
    bundle: &Path,
) -> Result<Option<Times>> {
    let started = Instant::now();
    for &i in wanted {
        let call = &mut calls[i];
        call.prepare(packages, count, bundle)?;
        let Some(prepared) = call.functions.get_mut(&count).and_then(|f| f.prepared.as_mut()) else {
            return Ok(None);
        };
        if packages[call.package].experts(prepared.id).is_none() {
            return Ok(None);
        }
        gather(&prepared.inputs, &mut prepared.scratch, registers)
            .map_err(|what| contradiction(bundle, &call.shard, what))?;
    }
    let prepared = || {
        wanted.iter().filter_map(|&i| Some((&calls[i], calls[i].functions.get(&count)?.prepared.as_ref()?)))
    };
    let Some(target) = prepared().next().and_then(|(_, p)| p.outputs.first()) else { return Ok(None) };
    let mut sum = std::mem::take(&mut registers[target.register]);
    let mut counts: SmallVec<[(u64, u64); MANY]> = smallvec![(0, 0); wanted.len()];
    let done = {
        let inputs: SmallVec<[Operands<'_>; MANY]> =
            prepared().map(|(_, p)| operands(&p.inputs, &p.scratch, registers, host).collect()).collect();
        let terms: SmallVec<[(&crate::cpu::Session, &[&Tensor]); MANY]> = prepared()
            .zip(&inputs)
            .filter_map(|((call, p), inputs)| {
                Some((packages[call.package].experts(p.id)?, inputs.as_slice()))
            })
            .collect();
        crate::cpu::add_experts(&terms, &mut sum, &mut counts)
    };
    registers[target.register] = sum;
    if !done? {
        return Ok(None);
    }
    let (time, all) = (started.elapsed(), counts.iter().map(|(bytes, _)| bytes).sum::<u64>());
    let share = |bytes: u64| if all > 0 { bytes as f64 / all as f64 } else { 1.0 / wanted.len() as f64 };
    let ran: Times = counts.iter().map(|(bytes, _)| time.mul_f64(share(*bytes))).collect();
    for ((call, p), (counts, time)) in prepared().zip(counts.iter().zip(&ran)) {
        packages[call.package].count(p.id, *counts, *time);
    }
    Ok(Some(ran))
}
