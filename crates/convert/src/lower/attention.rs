//! Grouped-query attention over a key/value cache that is one Core ML state, or an input that the host keeps.

use super::Lowering;
use crate::form::{AttentionForm, CacheForm, IoForm};
use anemoe_mlpackage::Result;
use anemoe_mlpackage::mil::builder::Var;
use anemoe_mlpackage::mil::{DataType, TensorType, Value};
use half::f16;

/// Shape of an attention layer.
#[derive(Clone, Copy, Debug)]
pub struct AttentionDims {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Cache slots; a multiple of 32.
    pub slots: usize,
    /// First slots of the cache, those that the function sees; a multiple of 32.
    pub seen: usize,
    /// Rows of the state behind the slots, for the layer's history; a multiple of 32.
    pub tail: usize,
    /// True if the stored vector `sinks`, `[1, heads, 1, 1]`, has a score for each head that takes part in the softmax
    /// and has no value.
    pub has_sinks: bool,
}

/// Inputs that the host gives to every attention shard, besides the hidden state.
pub struct PositionInputs {
    /// Inputs that queries need.
    pub of_queries: QueryInputs,
    keep: Var,
    place: Var,
}

/// Rotary rows of a call's tokens, and the mask of their scores.
pub struct QueryInputs {
    cos: Var,
    sin: Var,
    mask: Var,
}

/// Keys and values of an attention layer before the call.
pub struct LayerCache {
    holder: Holder,
    pub(super) old: Var,
}

/// Holder of an attention layer's cache.
enum Holder {
    /// A state of the layer.
    State(Var),
    /// A part of the state that all layers of the package share; see [`SharedCache`].
    Shared,
    /// The host.
    Host,
}

/// Keys and values of all layers of a package in one state, `[1, layers * 2 * kv_heads, slots, padded head_dim]`:
/// programs with more than two states fail where they are run.
pub struct SharedCache {
    state: Var,
    old: Var,
    /// Heads of one layer, keys and values.
    heads: usize,
    /// Slots that the function sees, where these are not all.
    part: Option<usize>,
}

/// Name of the cache, as a state and as an input.
pub const KV_CACHE: &str = "kv_cache";
/// Output with the cache rows of the call's own tokens, where the host keeps the cache.
pub const KV_ROWS: &str = "kv_rows";
/// Input that places the rows of the call's own tokens: the slots that they go into.
pub const KV_PLACE: &str = "kv_place";
/// Name of a cache that another model lends, behind its kind.
pub const LENT_CACHE: &str = "cache";

impl AttentionDims {
    /// Returns the width of a cache row: the head's channels, padded to a multiple of 32, as the ANE wants states.
    pub fn padded_dim(&self) -> usize {
        self.head_dim.next_multiple_of(32)
    }

    /// Returns the type of the cache, `[1, 2 * kv_heads, rows, padded head_dim]` in fp16: keys of all heads, then
    /// values of all heads. A state has `slots + tail` rows, an input of the host has `seen` rows. Keys, values and
    /// tail share one state, since programs with more than one state failed on some systems.
    pub fn cache_type(&self, form: CacheForm) -> TensorType {
        let rows = match form {
            CacheForm::State => self.slots + self.tail,
            CacheForm::Host => self.seen,
        };
        let dims = [1, 2 * self.kv_heads as u64, rows as u64, self.padded_dim() as u64];
        TensorType::fixed(DataType::Float16, &dims)
    }
}

impl Lowering<'_> {
    /// Declares the inputs that depend on positions: rotary rows, mask and cache placement.
    pub fn position_inputs(&mut self, shape: &AttentionDims, rotary_dim: usize) -> Result<PositionInputs> {
        let s = shape.seen as u64;
        let (cos, sin, mask) = self.declare_query_inputs("", shape, rotary_dim)?;
        if self.form.io == IoForm::ChannelsFirst {
            let keep = self.input("kv_keep", &[1, 1, s, 1], None)?;
            let place = self.input(KV_PLACE, &[1, 1, s, 0], Some(3))?;
            return Ok(PositionInputs { of_queries: QueryInputs { cos, sin, mask }, keep, place });
        }
        // No value at the border ends in an axis of 1: slots are last there, and turned to where they are used.
        let keep = self.input("kv_keep", &[1, 1, 1, s], None)?;
        let place = self.input(KV_PLACE, &[1, 1, 0, s], Some(2))?;
        let turned = [0, 1, 3, 2];
        let mask = self.turn_mask("", &mask)?;
        let keep = self.f().transpose("kv_keep_column", &keep, &turned)?;
        let place = self.f().transpose("kv_place_columns", &place, &turned)?;
        Ok(PositionInputs { of_queries: QueryInputs { cos, sin, mask }, keep, place })
    }

    /// Declares rotary rows and mask, as they are at the border.
    fn declare_query_inputs(
        &mut self,
        prefix: &str,
        shape: &AttentionDims,
        rotary_dim: usize,
    ) -> Result<(Var, Var, Var)> {
        let (d, s) = (rotary_dim as u64, shape.seen as u64);
        let cos = self.input(&format!("{prefix}rope_cos"), &[1, 1, 0, d], Some(2))?;
        let sin = self.input(&format!("{prefix}rope_sin"), &[1, 1, 0, d], Some(2))?;
        let name = format!("{prefix}mask");
        let mask = match (self.form.io, self.form.attention) {
            (IoForm::ChannelsFirst, AttentionForm::PerHead) => self.input(&name, &[1, s, 1, 0], Some(3))?,
            _ => self.input(&name, &[1, 1, 0, s], Some(2))?,
        };
        Ok((cos, sin, mask))
    }

    /// Turns a mask of the border to where attention adds it.
    fn turn_mask(&mut self, prefix: &str, mask: &Var) -> Result<Var> {
        match (self.form.io, self.form.attention) {
            (IoForm::ChannelsLast, AttentionForm::PerHead) => {
                self.f().transpose(&format!("{prefix}mask_columns"), mask, &[0, 3, 1, 2])
            }
            _ => Ok(mask.clone()),
        }
    }

    /// Declares a cache that another model lends, `PREFIXcache`, with rotary rows and mask of the layers that read it. Returns
    /// these, keys, and values, each `[1, kv_heads, slots, head_dim]`.
    pub fn lent_cache(
        &mut self,
        prefix: &str,
        shape: &AttentionDims,
        rotary_dim: usize,
    ) -> Result<(QueryInputs, Var, Var)> {
        let (cos, sin, mask) = self.declare_query_inputs(prefix, shape, rotary_dim)?;
        let mut all = self.f().input(&format!("{prefix}{LENT_CACHE}"), shape.cache_type(CacheForm::Host))?;
        let mask = self.turn_mask(prefix, &mask)?;
        if shape.padded_dim() > shape.head_dim {
            let size = [1, -1, shape.seen as i32, shape.head_dim as i32];
            all = self.f().slice_by_size(&format!("{prefix}kv_unpadded"), &all, &[0; 4], &size)?;
        }
        let mut halves = self.f().split(&format!("{prefix}kv_half"), &all, 2, 1)?.into_iter();
        match (halves.next(), halves.next()) {
            (Some(keys), Some(values)) => Ok((QueryInputs { cos, sin, mask }, keys, values)),
            _ => unreachable!("split into 2 gives 2"),
        }
    }

    /// Turns `[1, heads * head_dim, 1, T]` to `[1, heads, T, head_dim]`: the head's channels become the last axis,
    /// which the ANE pads to 64 bytes. With T last, a single token would fill 1/32 of that.
    pub fn to_heads(&mut self, name: &str, x: &Var, heads: usize, head_dim: usize) -> Result<Var> {
        let t = self.tokens_or_inferred();
        let split = self.f().reshape(&format!("{name}_split"), x, &[1, heads as i32, head_dim as i32, t])?;
        self.f().transpose(name, &split, &[0, 1, 3, 2])
    }

    /// Turns `[1, heads, T, head_dim]` to `[1, heads * head_dim, 1, T]`, the inverse of [`Lowering::to_heads`].
    pub fn join_heads(&mut self, name: &str, x: &Var, heads: usize, head_dim: usize) -> Result<Var> {
        let t = self.tokens_or_inferred();
        let transposed = self.f().transpose(&format!("{name}_turned"), x, &[0, 1, 3, 2])?;
        self.f().reshape(name, &transposed, &[1, (heads * head_dim) as i32, 1, t])
    }

    /// Rotates the channel pairs (c, c + rotary_dim/2) of `[1, heads, T, head_dim]` by the host's rows; channels from
    /// `rotary_dim` on stay.
    pub fn rotate(
        &mut self,
        name: &str,
        x: &Var,
        rotary_dim: usize,
        head_dim: usize,
        at: &QueryInputs,
    ) -> Result<Var> {
        if rotary_dim == head_dim {
            return self.rotate_all(name, x, at);
        }
        // The rotated channels become a value of their own before they are split into halves: on the M2, two pieces
        // of one tensor that both begin behind its first channel gave wrong elements when they were joined
        // (ANEForge).
        let sizes = [rotary_dim as i32, (head_dim - rotary_dim) as i32];
        let parts = self.f().split_sizes(&format!("{name}_part"), x, &sizes, -1)?;
        let rotated = self.rotate_all(&format!("{name}_turned"), &parts[0], at)?;
        self.f().concat(name, &[&rotated, &parts[1]], -1)
    }

    fn rotate_all(&mut self, name: &str, x: &Var, at: &QueryInputs) -> Result<Var> {
        let f = self.f();
        let halves = f.split(&format!("{name}_half"), x, 2, -1)?;
        let swapped = f.concat(&format!("{name}_swapped"), &[&halves[1], &halves[0]], -1)?;
        let straight = f.mul(&format!("{name}_cos"), x, &at.cos)?;
        let rotated = f.mul(&format!("{name}_sin"), &swapped, &at.sin)?;
        f.add(name, &straight, &rotated)
    }

    /// Declares the cache, a state or an input of the host, and returns its contents before the call.
    pub fn read_cache(&mut self, shape: &AttentionDims) -> Result<LayerCache> {
        let ty = shape.cache_type(self.form.cache);
        if self.form.cache == CacheForm::Host {
            let old = self.f().input(KV_CACHE, ty)?;
            return Ok(LayerCache { holder: Holder::Host, old });
        }
        let state = self.f().state(KV_CACHE, ty)?;
        let old = self.f().read_state("kv_old", &state)?;
        Ok(LayerCache { holder: Holder::State(state), old })
    }

    /// Declares one state for the caches of `layers` layers of a shape without a tail.
    pub fn shared_cache(&mut self, shape: &AttentionDims, layers: usize) -> Result<SharedCache> {
        let heads = 2 * shape.kv_heads;
        let all = AttentionDims { kv_heads: layers * shape.kv_heads, ..*shape };
        let state = self.f().state(KV_CACHE, all.cache_type(CacheForm::State))?;
        let old = self.f().read_state("kv_old", &state)?;
        let part = (shape.seen < shape.slots).then_some(shape.seen);
        Ok(SharedCache { state, old, heads, part })
    }

    /// Returns the cache of layer `i` of those that share a state.
    pub fn cache_of(&mut self, all: &SharedCache, i: usize) -> Result<LayerCache> {
        let begin = [0, (i * all.heads) as i32, 0, 0];
        let size = [1, all.heads as i32, all.part.map_or(-1, |n| n as i32), -1];
        let old = self.f().slice_by_size("kv_old_layer", &all.old, &begin, &size)?;
        Ok(LayerCache { holder: Holder::Shared, old })
    }

    /// Writes the rows of all layers that share a state, each as [`Lowering::update_cache`] returned them.
    ///
    /// The rows are joined, not the caches: a state that is written with what `concat` gave was refused on some systems,
    /// where a blend in the same model was not.
    pub fn write_shared(&mut self, all: &SharedCache, rows: &[Var], at: &PositionInputs) -> Result<()> {
        let new = self.f().concat("kv_new_layers", &rows.iter().collect::<Vec<_>>(), 1)?;
        let old = match all.part {
            Some(seen) => {
                let size = [1, -1, seen as i32, -1];
                self.f().slice_by_size("kv_old_slots", &all.old, &[0; 4], &size)?
            }
            None => all.old.clone(),
        };
        let mut updated = self.blend("layers", &old, &new, at)?;
        let f = self.f();
        if let Some(seen) = all.part {
            let row = all.old.dims().get(3).and_then(|d| d.fixed()).unwrap_or_default();
            let end = [1, (rows.len() * all.heads) as i32, seen as i32, row as i32];
            updated = f.slice_update("kv_updated_all", &all.old, &updated, &[0; 4], &end)?;
        }
        f.write_state(&all.state, &updated)
    }

    /// Computes `old * keep + place . new`, as `kv_updated` with a suffix.
    fn blend(&mut self, suffix: &str, old: &Var, new: &Var, at: &PositionInputs) -> Result<Var> {
        let name = |what: &str| match suffix {
            "" => format!("kv_{what}"),
            _ => format!("kv_{what}_{suffix}"),
        };
        let single = self.is_single_token();
        let f = self.f();
        let kept = f.mul(&name("kept"), old, &at.keep)?;
        let placed = if single {
            f.mul(&name("placed"), new, &at.place)?
        } else {
            f.matmul(&name("placed"), &at.place, new, false, false)?
        };
        f.add(&name("updated"), &kept, &placed)
    }

    /// Writes the new keys and values `[1, kv_heads, T, head_dim]` to the cache, and a new tail
    /// `[1, 2 * kv_heads, tail, padded head_dim]` where there is one. Returns the keys and values that the function
    /// sees, each `[1, kv_heads, seen, head_dim]`, and the new rows where they are not written yet: the host keeps them,
    /// or layers share a state.
    ///
    /// The position enters as data: `cache * keep + place . new`, exact in fp16 because `keep` and `place` hold only
    /// zeros and ones. Slice bounds are constant, and nothing is gathered, scattered or compared. A function that
    /// sees fewer slots than the state has reads and writes these slots alone: `state[.., ..seen, ..] = updated`.
    pub fn update_cache(
        &mut self,
        cache: &LayerCache,
        (k, v): (&Var, &Var),
        tail: Option<&Var>,
        at: &PositionInputs,
        shape: &AttentionDims,
    ) -> Result<(Var, Var, Vec<Var>)> {
        let padding = shape.padded_dim() - shape.head_dim;
        let (seen, d) = (shape.seen as i32, shape.head_dim as i32);
        let is_part = shape.seen < shape.slots && matches!(cache.holder, Holder::State(_));
        let by_host = matches!(cache.holder, Holder::Host);
        let f = self.f();
        // The last op of these carries the output's name, where the host keeps the cache.
        let name = |inner, last: bool| if last && by_host { KV_ROWS } else { inner };
        let mut new = f.concat(name("kv_new", padding == 0), &[k, v], 1)?;
        if padding > 0 {
            let zero = f.constant("kv_zero", Value::fp16(f16::ZERO))?;
            let ends = [0, 0, 0, 0, 0, 0, 0, padding as i32];
            new = f.pad(name("kv_padded", true), &new, &ends, &zero)?;
        }
        let old = match tail.is_some() || is_part {
            false => cache.old.clone(),
            true => f.slice_by_size("kv_old_slots", &cache.old, &[0; 4], &[1, -1, seen, -1])?,
        };
        let mut updated = self.blend("", &old, &new, at)?;
        let f = self.f();
        if is_part {
            let (heads, row) = (2 * shape.kv_heads as i32, shape.padded_dim() as i32);
            let end = [1, heads, seen, row];
            updated = f.slice_update("kv_updated_all", &cache.old, &updated, &[0; 4], &end)?;
            if let Some(tail) = tail {
                let (first, end) = (shape.slots as i32, (shape.slots + shape.tail) as i32);
                let (begin, end) = ([0, 0, first, 0], [1, heads, end, row]);
                updated = f.slice_update("kv_updated_tail", &updated, tail, &begin, &end)?;
            }
        } else if let Some(tail) = tail {
            updated = f.concat("kv_updated_all", &[&updated, tail], 2)?;
        }
        let (mut all, kept) = match &cache.holder {
            Holder::State(state) => {
                f.write_state(state, &updated)?;
                (f.read_state("kv_current", state)?, Vec::new())
            }
            Holder::Shared | Holder::Host => (updated, vec![new]),
        };
        if padding > 0 || tail.is_some() || is_part {
            all = f.slice_by_size("kv_unpadded", &all, &[0; 4], &[1, -1, seen, d])?;
        }
        let mut halves = f.split("kv_half", &all, 2, 1)?.into_iter();
        match (halves.next(), halves.next()) {
            (Some(keys), Some(values)) => Ok((keys, values, kept)),
            _ => unreachable!("split into 2 gives 2"),
        }
    }

    /// Computes attention of the queries `[1, heads, T, head_dim]`, already scaled, over the cache:
    /// `[1, heads * head_dim, 1, T]`.
    ///
    /// The query heads of one key/value head are rows of one matrix product, so that keys and values are not repeated.
    pub fn attend(
        &mut self,
        q: &Var,
        keys: &Var,
        values: &Var,
        at: &QueryInputs,
        shape: &AttentionDims,
    ) -> Result<Var> {
        if self.form.attention == AttentionForm::PerHead {
            return self.attend_per_head(q, keys, values, at, shape);
        }
        let t = self.tokens_or_inferred();
        let (heads, kv, d, slots) =
            (shape.heads as i32, shape.kv_heads as i32, shape.head_dim as i32, shape.seen as i32);
        let rows = if t < 0 { -1 } else { heads / kv * t };
        let sinks = if shape.has_sinks { Some(self.vector("sinks")?) } else { None };
        let f = self.f();
        let grouped = f.reshape("q_grouped", q, &[1, kv, rows, d])?;
        let raw = f.matmul("scores_grouped", &grouped, keys, false, true)?;
        let scores = f.reshape("scores", &raw, &[1, heads, t, slots])?;
        let masked = f.add("scores_masked", &scores, &at.mask)?;
        let weights = self.softmax("attention", &masked, sinks.as_ref(), -1)?;
        let f = self.f();
        let weights = f.reshape("attention_grouped", &weights, &[1, kv, rows, slots])?;
        let mixed = f.matmul("context_grouped", &weights, values, false, false)?;
        let context = f.reshape("context_heads", &mixed, &[1, heads, t, d])?;
        self.join_heads("context", &context, shape.heads, shape.head_dim)
    }

    /// Computes the softmax along an axis, with one score more, `sink`, whose part is left out:
    /// `e(s) / (sum e(s) + e(sink))` with `e(s) = exp(s - max(s, sink))`.
    fn softmax(&mut self, name: &str, scores: &Var, sink: Option<&Var>, axis: i32) -> Result<Var> {
        let n = |part: &str| format!("{name}_{part}");
        let f = self.f();
        let Some(sink) = sink else { return f.softmax(name, scores, axis) };
        let largest = f.reduce_max(&n("max"), scores, &[axis], true)?;
        let largest = f.maximum(&n("largest"), &largest, sink)?;
        let below = f.sub(&n("below"), scores, &largest)?;
        let powers = f.single("exp", &n("powers"), vec![("x", (&below).into())])?;
        let sum = f.reduce_sum(&n("sum"), &powers, &[axis], true)?;
        let below = f.sub(&n("sink_below"), sink, &largest)?;
        let power = f.single("exp", &n("sink_power"), vec![("x", (&below).into())])?;
        let sum = f.add(&n("sum_with_sink"), &sum, &power)?;
        f.real_div(name, &powers, &sum)
    }

    /// Splits `[1, n, ..]` along axis 1 into n values `[1, 1, ..]`.
    pub(super) fn split_axis_1(&mut self, name: &str, x: &Var, n: usize) -> Result<Vec<Var>> {
        if n == 1 { Ok(vec![x.clone()]) } else { self.f().split(name, x, n, 1) }
    }

    /// Computes attention like [`Lowering::attend`], each query head by itself, with the keys on the softmax's
    /// channel axis:
    ///
    /// ```text
    /// K [1, 1, slots, d] x q^T [1, 1, d, T] -> [1, slots, 1, T] + mask -> softmax over axis 1
    ///   -> [1, 1, slots, T]^T x V [1, 1, slots, d] -> [1, 1, T, d]
    /// ```
    fn attend_per_head(
        &mut self,
        q: &Var,
        keys: &Var,
        values: &Var,
        at: &QueryInputs,
        shape: &AttentionDims,
    ) -> Result<Var> {
        let (t, slots) = (self.tokens_or_inferred(), shape.seen as i32);
        let queries = self.split_axis_1("q_head", q, shape.heads)?;
        let keys = self.split_axis_1("k_head", keys, shape.kv_heads)?;
        let values = self.split_axis_1("v_head", values, shape.kv_heads)?;
        let sinks = if shape.has_sinks { Some(self.vector("sinks")?) } else { None };
        let sinks = sinks.map(|all| self.split_axis_1("sink_head", &all, shape.heads)).transpose()?;
        let mut contexts = Vec::new();
        for (h, query) in queries.iter().enumerate() {
            let n = |part: &str| format!("{part}_{h:02}");
            let of = h * shape.kv_heads / shape.heads;
            let f = self.f();
            let raw = f.matmul(&n("scores_raw"), &keys[of], query, false, true)?;
            let scores = f.reshape(&n("scores"), &raw, &[1, slots, 1, t])?;
            let masked = f.add(&n("scores_masked"), &scores, &at.mask)?;
            let sink = sinks.as_ref().map(|all| &all[h]);
            let weights = self.softmax(&n("attention"), &masked, sink, 1)?;
            let f = self.f();
            let weights = f.reshape(&n("attention_columns"), &weights, &[1, 1, slots, t])?;
            contexts.push(f.matmul(&n("context"), &weights, &values[of], true, false)?);
        }
        let all: Vec<&Var> = contexts.iter().collect();
        let context = match all.as_slice() {
            [one] => (*one).clone(),
            all => self.f().concat("context_heads", all, 1)?,
        };
        self.join_heads("context", &context, shape.heads, shape.head_dim)
    }
}
