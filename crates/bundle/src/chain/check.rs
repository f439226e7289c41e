//! Checks of a chain for contradictions: sizes out of range, unknown names, registers that no step writes.

use super::chain_file::FORMATS;
use super::contract::{Centroids, Chain, ShardFunction};
use super::steps::{HostInput, InputBinding, Kept, RowRange, Run, Step};
use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::path::{Component, Path};

/// Largest size in a chain, so that the product of two sizes does not overflow.
const MAX_SIZE: usize = 1 << 24;

/// Range of logit caps, see [`super::ModelInfo::final_logit_softcapping`]. Published caps are 30 and 50.
pub const SOFTCAPPING: RangeInclusive<f32> = 0.1..=1e6;

/// Range of an embedding's factor; published factors are square roots of the embedding's width.
const EMBEDDING_SCALE: RangeInclusive<f32> = 1e-6..=1e6;

/// Most rows that a shard carries from call to call; a short convolution needs few.
const MAX_CARRY: usize = 1 << 10;

/// Most channels of a register that [`Step::Zero`] makes.
const MAX_CHANNELS: usize = 1 << 16;

/// Most registers that [`Step::Zero`] makes: steps of all layers use the same ones.
const MAX_ZEROED: usize = 16;

impl Chain {
    /// Checks that the chain does not contradict itself; the error names the contradiction.
    pub(super) fn check(&self) -> std::result::Result<(), String> {
        let m = &self.model;
        let sizes = [m.vocab_size, m.hidden_size, m.max_context];
        if sizes.iter().any(|&n| n == 0 || n > MAX_SIZE) {
            return Err(format!(
                "model: vocab_size, hidden_size and max_context must be from 1 to {MAX_SIZE}"
            ));
        }
        if m.num_experts.is_some_and(|n| n == 0 || n > MAX_SIZE) {
            return Err(format!("model: num_experts must be from 1 to {MAX_SIZE}"));
        }
        if let Some(of) = &self.assistant {
            let groups =
                |c: &Centroids| c.top_k > 0 && c.top_k <= c.count && m.vocab_size.is_multiple_of(c.count);
            if of.target_hidden_size == 0
                || of.target_hidden_size > MAX_SIZE
                || !(0.0..1.0).contains(&of.eps)
                || !of.centroids.as_ref().is_none_or(groups)
            {
                return Err("assistant: sizes that cannot be".into());
            }
        }
        let is_looked_up = self.assistant.as_ref().is_none_or(|of| of.centroids.is_some());
        let rows = if is_looked_up { m.vocab_size } else { 0 };
        if (self.embedding.rows, self.embedding.cols) != (rows, m.hidden_size) {
            return Err(format!(
                "embedding: [{}, {}] where the model says [{}, {}]",
                self.embedding.rows, self.embedding.cols, rows, m.hidden_size
            ));
        }
        if let Some(cap) = m.final_logit_softcapping.filter(|cap| !SOFTCAPPING.contains(cap)) {
            let (least, most) = (SOFTCAPPING.start(), SOFTCAPPING.end());
            return Err(format!(
                "model: final_logit_softcapping is {cap:e}, expected a number from {least} to {most}"
            ));
        }
        if !EMBEDDING_SCALE.contains(&self.embedding.scale) {
            let (scale, least, most) = (self.embedding.scale, EMBEDDING_SCALE.start(), EMBEDDING_SCALE.end());
            return Err(format!("embedding: scale is {scale:e}, expected a number from {least} to {most}"));
        }
        check_path(&self.embedding.file).map_err(|e| format!("embedding: {e}"))?;
        if let Some(vectors) = &self.vectors {
            check_path(&vectors.file).map_err(|e| format!("vectors: {e}"))?;
        }
        if self.head_order.is_some() != (self.format == FORMATS[1]) {
            return Err("head_order: present in format 2, and only there".into());
        }
        if let (Some(name), None) = (&self.head_order, &self.vectors) {
            return Err(format!("head_order: no file holds the vector `{name}`"));
        }
        if let Some(drafter) = &self.drafter {
            check_path(drafter).map_err(|e| format!("drafter: {e}"))?;
        }
        if rows > 0 && self.embedding.storage.stored_sizes(rows, self.embedding.cols).is_none() {
            return Err(format!("embedding: {} does not fit its rows and columns", self.embedding.storage));
        }
        if self.tokens.is_empty()
            || self.tokens.iter().any(|t| t.min == 0 || t.min > t.max || t.max > 1 << 16)
        {
            return Err("tokens: at least one count, each 1 <= min <= max <= 65536".into());
        }
        for (name, rope) in &self.ropes {
            if rope.width < rope.inv_freq.len().saturating_mul(2) || rope.width > MAX_SIZE {
                return Err(format!(
                    "rope `{name}`: width {} for {} frequencies",
                    rope.width,
                    rope.inv_freq.len()
                ));
            }
            if let Some(f) = rope.inv_freq.iter().find(|f| !(0.0..=1.0).contains(*f)) {
                return Err(format!("rope `{name}`: a frequency of {f:e}, expected numbers from 0 to 1"));
            }
        }
        for (name, cache) in &self.caches {
            let needed = cache
                .window
                .map_or(m.max_context, |w| (w.saturating_add(self.max_tokens() - 1)).min(m.max_context));
            let needed = needed.max(1);
            if cache.slots < needed || cache.slots > m.max_context.next_multiple_of(32) {
                return Err(format!(
                    "cache `{name}`: {} slots where at least {needed} are needed",
                    cache.slots
                ));
            }
        }
        if self.steps.is_empty() {
            return Err("steps: none, so that nothing leads from a token to its logits".into());
        }
        let mut names = BTreeSet::new();
        for shard in &self.shards {
            check_path(&shard.file).map_err(|e| format!("shard `{}`: {e}", shard.name))?;
            if !names.insert(shard.name.as_str()) {
                return Err(format!("shard `{}` appears twice", shard.name));
            }
            if shard.functions.is_empty() {
                return Err(format!("shard `{}` has no function", shard.name));
            }
        }
        let zeroed: BTreeSet<&str> = self
            .steps
            .iter()
            .chain(&self.head)
            .filter_map(|s| if let Step::Zero { register, .. } = s { Some(register.as_str()) } else { None })
            .collect();
        if zeroed.len() > MAX_ZEROED {
            return Err(format!("{} registers of zeros, more than {MAX_ZEROED}", zeroed.len()));
        }
        let mut written: BTreeSet<&str> = BTreeSet::from(["hidden"]);
        written.extend(self.assistant.as_ref().map(|_| "input"));
        for step in self.steps.iter().chain(&self.head) {
            self.check_step(step, &mut written)?;
        }
        let normalized = self.assistant.as_ref().and_then(|of| of.centroids).map(|_| "normalized");
        for register in
            ["logits"].into_iter().chain(self.assistant.as_ref().map(|_| "state")).chain(normalized)
        {
            if !written.contains(register) {
                return Err(format!("no step writes the register `{register}`"));
            }
        }
        Ok(())
    }

    /// Checks the context of a function against the caches of its run; the error names the contradiction.
    fn check_context(&self, run: &Run, function: &ShardFunction) -> std::result::Result<(), String> {
        let Some(context) = function.context else { return Ok(()) };
        let named =
            |what: String| Err(format!("function `{}`: a context of {context} {what}", function.name));
        let slots: Vec<usize> =
            run.cache_names().filter_map(|name| self.caches.get(name)).map(|c| c.slots).collect();
        match slots.iter().min() {
            None => named("positions, and no cache".into()),
            Some(slots) if context == 0 || context >= *slots => named(format!(
                "positions, expected fewer than the {slots} slots of its cache, and one at least"
            )),
            Some(_) => Ok(()),
        }
    }

    /// Checks a step, given the registers that earlier steps have `written`, and adds the registers that it writes.
    fn check_step<'a>(
        &'a self,
        step: &'a Step,
        written: &mut BTreeSet<&'a str>,
    ) -> std::result::Result<(), String> {
        match step {
            Step::Zero { register, channels } => {
                if *channels > MAX_CHANNELS {
                    return Err(format!("zero `{register}`: {channels} channels, more than {MAX_CHANNELS}"));
                }
                written.insert(register);
            }
            Step::Route { logits, weights, top_k, scale, bias, .. } => {
                check_read(logits, written)?;
                if let Some(v) = scale.iter().chain(bias).flatten().find(|v| !v.is_finite()) {
                    return Err(format!("route to `{weights}`: scale or bias {v}, expected finite numbers"));
                }
                if *top_k == 0 {
                    return Err(format!("route to `{weights}`: top_k is 0"));
                }
                written.insert(weights);
            }
            Step::Residual { stream, branch, vectors } => {
                check_read(stream, written)?;
                branch.as_ref().map_or(Ok(()), |b| check_read(b, written))?;
                if self.vectors.is_none() {
                    return Err(format!("residual of `{stream}`: no file holds vectors `{vectors}`"));
                }
            }
            Step::Normalize { from, to, vector, eps } => {
                check_read(from, written)?;
                if self.vectors.is_none() || !(0.0..1.0).contains(eps) {
                    return Err(format!("norm of `{from}`: vector `{vector}` or eps {eps} cannot be"));
                }
                written.insert(to);
            }
            Step::AddScaled { register, from, weights, .. } => {
                for name in [register, from, weights] {
                    check_read(name, written)?;
                }
            }
            Step::Run(run) => self.check_run(run, written)?,
        }
        Ok(())
    }

    /// Checks a call: its packages, conditions, inputs and outputs.
    fn check_run<'a>(
        &'a self,
        run: &'a Run,
        written: &mut BTreeSet<&'a str>,
    ) -> std::result::Result<(), String> {
        let mut counts = BTreeSet::new();
        for name in run.shards() {
            let shard = self.shard(name).ok_or_else(|| format!("no shard is named `{name}`"))?;
            let own = || shard.functions.iter().filter(|f| f.unit == run.unit);
            if !own().any(|f| f.context.is_none()) {
                return Err(match &run.unit {
                    Some(unit) => format!("shard `{name}` has no function for unit `{unit}`"),
                    None => format!("shard `{name}` has no function without a unit"),
                });
            }
            for f in own() {
                self.check_context(run, f).map_err(|what| format!("shard `{name}`: {what}"))?;
            }
            if !run.others.is_empty()
                && let Some(f) = own().find(|f| !counts.insert((f.tokens, f.context)))
            {
                let count = f.tokens.max;
                return Err(format!("shard `{name}`: another one has a function for {count} tokens, too"));
            }
        }
        if let Some(when) = &run.when {
            check_read(&when.register, written)?;
            check_rows(&when.rows)?;
            let end = when.rows.start + when.rows.count;
            if let Some(experts) = self.model.num_experts.filter(|experts| end > *experts) {
                return Err(format!("routing weights of {end} experts, where num_experts is {experts}"));
            }
        }
        for (input, binding) in &run.inputs {
            match binding {
                InputBinding::Register { name, rows, .. } => {
                    check_read(name, written)?;
                    rows.as_ref().map_or(Ok(()), check_rows)?;
                }
                InputBinding::Host(HostInput::Carry(rows)) => {
                    if *rows > MAX_CARRY {
                        return Err(format!("shard `{}`: {rows} rows to carry", run.shard));
                    }
                }
                InputBinding::Host(HostInput::RopeCos(name) | HostInput::RopeSin(name)) => {
                    if !self.ropes.contains_key(name) {
                        return Err(format!("shard `{}`, input `{input}`: no rope `{name}`", run.shard));
                    }
                }
                InputBinding::Host(
                    HostInput::Mask(name)
                    | HostInput::MaskColumns(name)
                    | HostInput::Place(name)
                    | HostInput::PlaceRows(name)
                    | HostInput::Keep(name)
                    | HostInput::KeepRow(name),
                ) => {
                    if !self.caches.contains_key(name) {
                        return Err(format!("shard `{}`, input `{input}`: no cache `{name}`", run.shard));
                    }
                }
            }
        }
        for (input, kept) in &run.kept {
            kept.check(run, self).map_err(|what| format!("shard `{}`, kept `{input}`: {what}", run.shard))?;
        }
        for binding in run.outputs.values() {
            binding.rows.as_ref().map_or(Ok(()), check_rows)?;
            if binding.accumulate {
                check_read(&binding.register, written)?;
            }
            written.insert(&binding.register);
        }
        Ok(())
    }
}

impl Kept {
    /// Checks kept rows against the run that keeps them; the error names the contradiction.
    fn check(&self, run: &Run, chain: &Chain) -> std::result::Result<(), String> {
        if let Kept::Lent { cache, heads, channels } = self {
            let sizes = [*heads, *channels].iter().all(|n| (1..=MAX_CHANNELS).contains(n));
            return match chain.assistant.is_some() && sizes && chain.caches.contains_key(cache) {
                true => Ok(()),
                false => {
                    Err(format!("{heads} heads of {channels} channels of a cache `{cache}` of a target"))
                }
            };
        }
        let Some((rows, place)) = self.added() else { return Ok(()) };
        match run.inputs.get(place) {
            Some(InputBinding::Host(HostInput::Place(_) | HostInput::PlaceRows(_))) => {}
            _ => return Err(format!("input `{place}` does not place rows in slots")),
        }
        if let Kept::Newest { count, heads, channels, .. } = self
            && (*count > MAX_CARRY
                || [*count, *heads, *channels].iter().any(|n| *n == 0 || *n > MAX_CHANNELS))
        {
            return Err(format!("{count} rows of {heads} heads of {channels} channels"));
        }
        match run.outputs.contains_key(rows) {
            true => Err(format!("output `{rows}` goes into a register, too")),
            false => Ok(()),
        }
    }
}

/// Checks that an earlier step has written a register.
fn check_read(register: &str, written: &BTreeSet<&str>) -> std::result::Result<(), String> {
    if written.contains(register) {
        Ok(())
    } else {
        Err(format!("register `{register}` is read before any step writes it"))
    }
}

/// Checks that the start and the number of channels are at most [`MAX_SIZE`], so that their sum does not overflow.
fn check_rows(rows: &RowRange) -> std::result::Result<(), String> {
    if rows.start <= MAX_SIZE && rows.count <= MAX_SIZE {
        Ok(())
    } else {
        Err(format!("rows from {} on, {} of them: more than {MAX_SIZE}", rows.start, rows.count))
    }
}

/// Refuses a path that is empty or leaves the bundle.
fn check_path(file: &str) -> std::result::Result<(), String> {
    if !file.is_empty() && Path::new(file).components().all(|c| matches!(c, Component::Normal(_))) {
        Ok(())
    } else {
        Err(format!("path `{file}` leaves the bundle"))
    }
}
