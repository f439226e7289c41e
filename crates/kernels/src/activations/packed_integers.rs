//! Holds tokens as integers, and packs them in parallel.

use crate::Pool;
use crate::memory::AlignedVec;
use crate::simd::LANES;

/// Tokens as lines of integers with scales, and one T of each token.
#[derive(Clone, Debug, Default)]
pub(crate) struct IntegerTokens<T> {
    pub lines: AlignedVec<[u8; 64]>,      // [tokens, lines]
    pub scales: AlignedVec<[f32; LANES]>, // [tokens, scales]
    pub of_token: Vec<T>,
}

/// Packs a token: its index, lines, scales, and its T.
pub(super) type PackToken<'a, T> = dyn Fn(usize, &mut [[u8; 64]], &mut [[f32; LANES]], &mut T) + Sync + 'a;

impl<T: Copy + Default + Send> IntegerTokens<T> {
    /// Packs `tokens` tokens of `lines` lines and `scales` vectors of scales, at least `per_part` tokens a thread.
    pub fn pack(
        &mut self,
        pool: &Pool,
        (tokens, per_part): (usize, usize),
        (lines, scales): (usize, usize),
        pack_token: &PackToken<'_, T>,
    ) {
        self.lines.grow(tokens * lines, [0; 64]);
        self.scales.grow(tokens * scales, [0.0; LANES]);
        self.of_token.resize(self.of_token.len().max(tokens), T::default());
        let all = (&mut self.lines[..tokens * lines], &mut self.scales[..tokens * scales]);
        let of_token = &mut self.of_token[..tokens];
        let pack_part =
            |first: usize, of_lines: &mut [[u8; 64]], of_scales: &mut [[f32; LANES]], each: &mut [T]| {
                for (t, of_token) in each.iter_mut().enumerate() {
                    let (lines, scales) = (t * lines..(t + 1) * lines, t * scales..(t + 1) * scales);
                    pack_token(first + t, &mut of_lines[lines], &mut of_scales[scales], of_token);
                }
            };
        // A single part needs no list of parts, so that decoding allocates nothing.
        if tokens <= per_part {
            return pack_part(0, all.0, all.1, of_token);
        }
        let of_lines = all.0.chunks_mut((per_part * lines).max(1));
        let of_scales = all.1.chunks_mut((per_part * scales).max(1));
        let mut parts: Vec<_> = of_lines.zip(of_scales).zip(of_token.chunks_mut(per_part)).collect();
        pool.for_chunks(&mut parts, 1, &|i, parts| {
            for ((lines, scales), each) in parts {
                pack_part(i * per_part, lines, scales, each);
            }
        });
    }
}
