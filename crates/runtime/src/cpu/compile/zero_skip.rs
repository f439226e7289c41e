//! Finds instructions that need not run because their result is multiplied by zero.

use super::super::ir::{Instr, ValueRef, ZeroSkip};
use std::collections::BTreeMap;

/// Finds products `a * w` where `w` is much smaller than `a`, and the instructions that compute `a` have no other readers. If `w` is
/// all zero, the product and those instructions can be skipped. Returns the guards, and the guard of each step.
///
/// Buffers are reused, so readers are found by walking the instructions in order: a read belongs to the last write before it.
pub(super) fn find_zero_skips(
    instructions: &[Instr],
    outputs: &[ValueRef],
) -> (Vec<ZeroSkip>, Vec<Option<usize>>) {
    let mut writer: BTreeMap<usize, usize> = BTreeMap::new();
    // For each step: the instructions that produce its operands, and the instructions that read its results.
    let mut producers: Vec<Vec<usize>> = vec![Vec::new(); instructions.len()];
    let mut readers: Vec<Vec<usize>> = vec![Vec::new(); instructions.len()];
    // For each step: the producer of each operand, by buffer.
    let mut sources: Vec<BTreeMap<usize, usize>> = vec![BTreeMap::new(); instructions.len()];
    for (i, step) in instructions.iter().enumerate() {
        for b in step.reads() {
            if let Some(&w) = writer.get(&b) {
                producers[i].push(w);
                readers[w].push(i);
                sources[i].insert(b, w);
            }
        }
        writer.extend(step.writes().into_iter().map(|b| (b, i)));
    }
    let mut escapes = vec![false; instructions.len()];
    for place in outputs {
        if let ValueRef::Buffer(b) = place
            && let Some(&w) = writer.get(b)
        {
            escapes[w] = true;
        }
    }
    let mut zero_skips: Vec<ZeroSkip> = Vec::new();
    let mut zero_skip_of: Vec<Option<usize>> = vec![None; instructions.len()];
    for (m, step) in instructions.iter().enumerate() {
        let Some((x, y, out)) = step.product() else { continue };
        for (value, weight) in [(x, y), (y, x)] {
            let (ValueRef::Buffer(vb), ValueRef::Buffer(wb)) = (value, weight) else { continue };
            let (Some(&v), weight_step) = (sources[m].get(&vb), sources[m].get(&wb).copied()) else {
                continue;
            };
            // Interpreter whose results are read only to compute `value` and this product.
            let mut region = vec![v];
            let mut grown = true;
            let only_here = |s: usize, region: &[usize]| {
                !escapes[s]
                    && readers[s].iter().all(|r| *r == m || region.contains(r))
                    && instructions[s].is_pure()
            };
            if weight_step == Some(v) || !only_here(v, &region) {
                continue;
            }
            while grown {
                grown = false;
                for i in 0..region.len() {
                    for &p in &producers[region[i]] {
                        if Some(p) != weight_step && !region.contains(&p) && only_here(p, &region) {
                            region.push(p);
                            grown = true;
                        }
                    }
                }
            }
            let first = region.iter().copied().min().unwrap_or(m);
            let known_before = weight_step.is_none_or(|w| w < first);
            let worth = region.iter().any(|&s| instructions[s].is_projection());
            let free = region.iter().all(|&s| zero_skip_of[s].is_none());
            // The weight's buffer must not be overwritten before the region's first step.
            let between = instructions.get(weight_step.map_or(0, |w| w + 1)..first).unwrap_or_default();
            let intact = !between.iter().any(|s| s.writes().contains(&wb));
            if known_before && worth && free && intact && step.scales(value, weight) {
                let index = zero_skips.len();
                zero_skips.push(ZeroSkip { weight: wb, product: m, out });
                region.iter().chain([&m]).for_each(|&s| zero_skip_of[s] = Some(index));
                break;
            }
        }
    }
    (zero_skips, zero_skip_of)
}
