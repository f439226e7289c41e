//! Merges the chunks of a context.

use crate::simd::LANES;

/// Merges the softmax states of the chunks, in order, into
/// `out = sum_c e^(m_c - m) values_c / (sum_c e^(m_c - m) sum_c + e^(sink - m))`.
pub(super) fn merge_chunks<'a>(
    chunks: impl Iterator<Item = &'a [[f32; LANES]]> + Clone,
    sink: Option<f32>,
    out: &mut [f32],
) {
    let top = chunks.clone().map(|c| c[0][0]).fold(sink.unwrap_or(f32::NEG_INFINITY), f32::max);
    let mut total = sink.map_or(0.0, |sink| (sink - top).exp());
    out.fill(0.0);
    for chunk in chunks {
        let [this, sum, ..] = chunk[0];
        // No slot of the chunk was seen.
        if sum == 0.0 {
            continue;
        }
        let factor = (this - top).exp();
        total += sum * factor;
        out.iter_mut().zip(chunk[1..].as_flattened()).for_each(|(o, v)| *o += v * factor);
    }
    let factor = 1.0 / total;
    out.iter_mut().for_each(|o| *o *= factor);
}
