//! Error feedback: chooses codes and tables so that a matrix's outputs change least over a text, not its weights.
//!
//! ```text
//! H = mean x^ x^'   inputs that come, from compressed layers          cost of a row q for a target t:
//! G = mean x  x^'   x: inputs that the uncompressed model has            (q - t) H (q - t)'
//! target      t = w + (w G H^-1 - w) / 2
//! feedback    columns by falling diagonal of H = L L': t_j takes over the errors e_i = t_i - q_i of the columns
//!             before it times L[i,j] / L[j,j]
//! descent     q_j = nearest(q_j - g_j / H_jj), g = (q - t) H, until nothing changes, two sweeps at most
//! tables      the entries of least cost for fixed codes; then descent again, twice
//! ```
//! The cost never rises after the feedback (GPTQ's). Columns lie in ascending order of H's diagonal throughout, since
//! a factor is made from the first column on, and feedback goes from the last.

use super::dense::{Factor, add_gram, mirror, product};
use super::encoder::{Encoder, OutsideFp16, TablesAndScales};
use super::metrics::Metrics;
use crate::quant::Quant;
use anemoe_io::locked;
use anemoe_kernels::{Int16Lut, Pool, round_to_int16};
use anemoe_mlpackage::blob::pack_sub_byte;
use half::f16;
use std::array;
use std::sync::Mutex;

/// Share of the mean of H's diagonal that is added to the diagonal.
const DAMPING: f64 = 0.01;
/// Share of the way from the weights to what the least-squares map from the inputs that come to the outputs that
/// should come is.
const CORRECTION: f32 = 0.5;
/// Sweeps of a descent.
const SWEEPS: usize = 2;
/// Rows that descend together: their gradients, 4 bytes for each column, stay in L2, where all of H does not.
const DESCENT_ROWS: usize = 16;
/// Rounds of tables and descent.
const ROUNDS: usize = 2;
/// Rows that one thread compresses at a time, of whole tables.
const TILE_ROWS: usize = 128;
/// Columns of H whose sums over a row's codes are made at a time: 128 bytes for each input, which L2 holds, and sums that L1 holds.
const TABLE_COLUMNS: usize = 32;

/// Sums of inputs' products over tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct InputSums {
    /// Number of tokens, or their weight.
    pub count: f64,
    /// Sum of `x^ x^'`, `[cols, cols]`; the lower triangle.
    pub own: Vec<f32>,
    /// Sum of `x^ (x - x^)'`, `[cols, cols]`.
    pub cross: Vec<f32>,
}

impl InputSums {
    /// Makes sums over no tokens.
    pub fn new(cols: usize) -> InputSums {
        InputSums { count: 0.0, own: vec![0.0; cols * cols], cross: vec![0.0; cols * cols] }
    }

    /// Adds tokens, given as columns: `x` and `x^` are `[cols, tokens]`.
    pub fn add(&mut self, float: &[f32], compressed: &[f32], tokens: usize) {
        self.count += tokens as f64;
        add_gram(&mut self.own, compressed, tokens, 1.0);
        let change: Vec<f32> = float.iter().zip(compressed).map(|(x, c)| x - c).collect();
        if change.iter().any(|v| *v != 0.0) {
            let sums = product(compressed, &change, tokens);
            self.cross.iter_mut().zip(sums).for_each(|(s, v)| *s += v);
        }
    }

    /// Adds `weight` tokens of the mean of other sums.
    pub fn add_mean(&mut self, other: &InputSums, weight: f64) {
        let factor = (weight / other.count.max(1.0)) as f32;
        for (own, other) in [(&mut self.own, &other.own), (&mut self.cross, &other.cross)] {
            own.iter_mut().zip(other).for_each(|(s, o)| *s += factor * o);
        }
        self.count += weight;
    }
}

/// Second moments of a matrix's inputs, with their factor. Columns are in ascending order of the diagonal.
pub struct SecondMoments {
    cols: usize,
    /// Column of the matrix, by position.
    order: Vec<usize>,
    h: Vec<f32>,
    /// `(G - H)'`.
    cross: Vec<f32>,
    /// Cholesky factor of `h`.
    factor: Factor,
    /// Its diagonal.
    pivots: Vec<f32>,
}

impl SecondMoments {
    /// Makes moments of sums. Sums over no tokens count every input the same.
    pub fn new(sums: InputSums) -> SecondMoments {
        let n = (sums.own.len() as f64).sqrt() as usize;
        let InputSums { count, mut own, mut cross } = sums;
        mirror(&mut own, n);
        let scale = (1.0 / count.max(1.0)) as f32;
        own.iter_mut().chain(&mut cross).for_each(|v| *v *= scale);
        let trace: f64 = (0..n).map(|i| f64::from(own[i * n + i])).sum();
        let damping = (DAMPING * (trace / n as f64).max(1e-12)) as f32;
        (0..n).for_each(|i| own[i * n + i] += damping);
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by(|&a, &b| own[a * n + a].total_cmp(&own[b * n + b]).then(b.cmp(&a)));
        let arrange = |m: &[f32]| -> Vec<f32> {
            order.iter().flat_map(|&i| order.iter().map(move |&j| m[i * n + j])).collect()
        };
        let (h, cross) = (arrange(&own), arrange(&cross));
        let factor = Factor::new(h.clone(), n, damping * 1e-3);
        let pivots = factor.blocks.iter().flat_map(|b| b.own.iter().step_by(b.rows() + 1).copied()).collect();
        SecondMoments { cols: n, order, h, cross, factor, pivots }
    }

    /// Returns the number of inputs.
    pub fn inputs(&self) -> usize {
        self.cols
    }

    /// Returns the mean square of each input, damped.
    pub fn squares(&self) -> Vec<f32> {
        let mut out = vec![0f32; self.cols];
        self.order.iter().enumerate().for_each(|(i, &c)| out[c] = self.h[i * self.cols + i]);
        out
    }

    /// Arranges the columns of weights in the order of the moments.
    fn arrange(&self, w: &[f32]) -> Vec<f32> {
        w.chunks_exact(self.cols).flat_map(|row| self.order.iter().map(|&c| row[c])).collect()
    }

    /// Replaces arranged weights by their target.
    fn aim(&self, w: &mut [f32]) {
        if self.cross.iter().all(|v| *v == 0.0) {
            return;
        }
        Pool::global().for_chunks(w, TILE_ROWS * self.cols, &|_, w| {
            // w G H^-1 - w = w (G - H) H^-1
            let mut change = product(w, &self.cross, self.cols);
            self.factor.solve(&mut change);
            w.iter_mut().zip(&change).for_each(|(w, c)| *w += CORRECTION * c);
        });
    }
}

/// Values that a code can stand for.
#[derive(Clone, Copy)]
enum Grid<'a> {
    /// Entries of a table, ascending.
    Table(&'a [f32]),
    /// `scale * (code - zero)`, rounded to fp16, for codes from `low` to `high`.
    Linear { scale: f32, zero: f32, low: f32, high: f32 },
}

impl Grid<'_> {
    /// Returns the code of the value nearest to `v`, and the value.
    #[inline]
    fn nearest(self, v: f32) -> (u8, f32) {
        match self {
            Grid::Table(t) => {
                let is_above = |i: usize| v > 0.5 * (t[i] + t[i + 1]);
                let code: usize = match t.len() {
                    n if n <= 16 => (0..n - 1).map(|i| usize::from(is_above(i))).sum(),
                    n => {
                        let (mut low, mut high) = (0, n - 1);
                        while low < high {
                            let middle = (low + high) / 2;
                            (low, high) = if is_above(middle) { (middle + 1, high) } else { (low, middle) };
                        }
                        low
                    }
                };
                (code as u8, t[code])
            }
            Grid::Linear { scale, zero, low, high } => {
                let code = (v / scale + zero).round().clamp(low, high);
                (code as i8 as u8, f16::from_f32(scale * (code - zero)).to_f32())
            }
        }
    }
}

/// Rows of a matrix that are compressed together, columns in the order of the moments.
struct RowTile<'a> {
    m: &'a SecondMoments,
    encoder: &'a Encoder<'a>,
    /// Tables or scales of these rows, and offsets.
    values: &'a mut [f32],
    offsets: &'a [i8],
    target: &'a [f32],
    /// `target H`.
    target_h: Vec<f32>,
    codes: &'a mut [u8],
    /// Values of the codes.
    q: Vec<f32>,
}

impl RowTile<'_> {
    /// Returns the values that the code of a column in one of the tile's rows can stand for.
    fn grid(&self, row: usize, column: usize) -> Grid<'_> {
        let (block_rows, block_cols) = self.encoder.quant.block(self.encoder.rows, self.encoder.cols);
        match self.encoder.quant.kind {
            Quant::Int { bits, .. } => {
                let at = row / block_rows * (self.m.cols / block_cols) + column / block_cols;
                let half = (1i32 << (bits.bits() - 1)) as f32;
                let zero = self.offsets.get(at).map_or(0.0, |o| f32::from(*o));
                Grid::Linear { scale: self.values[at], zero, low: -half, high: half - 1.0 }
            }
            _ => {
                let n = 1usize << self.encoder.quant.kind.bits();
                Grid::Table(&self.values[row / block_rows * n..][..n])
            }
        }
    }

    /// Chooses all codes once, from the last column to the first; errors go to the columns before.
    fn feed_back(&mut self) {
        let n = self.m.cols;
        let mut wanted = self.target.to_vec();
        let rows = wanted.len() / n;
        for b in self.m.factor.blocks.iter().rev() {
            let (first, width) = (b.first, b.rows());
            let pivots = &self.m.pivots[first..first + width];
            let mut errors = vec![0f32; rows * width];
            for (r, (wanted, errors)) in
                wanted.chunks_exact_mut(n).zip(errors.chunks_exact_mut(width)).enumerate()
            {
                let wanted = &mut wanted[first..first + width];
                for k in (0..width).rev() {
                    let at = r * n + first + k;
                    let (code, value) = self.grid(r, self.m.order[first + k]).nearest(wanted[k]);
                    errors[k] = self.target[at] - value;
                    for ((w, l), pivot) in wanted[..k].iter_mut().zip(&b.own[k * width..]).zip(pivots) {
                        *w += errors[k] * (l / pivot);
                    }
                    (self.codes[at], self.q[at]) = (code, value);
                }
            }
            let sums = b.times_before(&errors, width, 0);
            for (wanted, sums) in wanted.chunks_exact_mut(n).zip(sums.chunks_exact(first.max(1))) {
                let shares = sums.iter().zip(&self.m.pivots).map(|(s, pivot)| s / pivot);
                wanted.iter_mut().zip(shares).for_each(|(w, s)| *w += s);
            }
        }
    }

    /// Moves each code to the least cost given all others, in sweeps from the last column to the first.
    fn descend(&mut self) {
        let n = self.m.cols;
        let error: Vec<f32> = self.q.iter().zip(self.target).map(|(q, t)| q - t).collect();
        let mut gradient = product(&error, &self.m.h, n);
        for (i, gradient) in gradient.chunks_mut(DESCENT_ROWS * n).enumerate() {
            let mut moves = [true; DESCENT_ROWS];
            for _ in 0..SWEEPS {
                let mut has_moved = [false; DESCENT_ROWS];
                for k in (0..n).rev() {
                    // A row of H serves all rows that still move.
                    let h = &self.m.h[k * n..(k + 1) * n];
                    for (j, g) in gradient.chunks_exact_mut(n).enumerate().filter(|(j, _)| moves[*j]) {
                        let r = i * DESCENT_ROWS + j;
                        let at = r * n + k;
                        let (code, value) = self.grid(r, self.m.order[k]).nearest(self.q[at] - g[k] / h[k]);
                        let change = value - self.q[at];
                        if change != 0.0 {
                            (self.codes[at], self.q[at]) = (code, value);
                            g.iter_mut().zip(h).for_each(|(g, h)| *g += change * h);
                            has_moved[j] = true;
                        }
                    }
                }
                moves = has_moved;
            }
        }
    }

    /// Chooses the entries of each table anew for its codes.
    fn refit(&mut self) {
        let (n, k) = (self.m.cols, 1usize << self.encoder.quant.kind.bits());
        let size = self.encoder.quant.group * n;
        let products = self.products_of_codes();
        for (g, (table, a)) in self.values.chunks_exact_mut(k).zip(products.chunks_exact(k * k)).enumerate() {
            let own = g * size..(g + 1) * size;
            let codes = &mut self.codes[own.clone()];
            // The cost of entries c is c A c' - 2 b c' and a constant.
            let mut b = vec![0f64; k];
            for (code, w) in codes.iter().zip(&self.target_h[own.clone()]) {
                b[usize::from(*code)] += f64::from(*w);
            }
            let Some(order) = refit_table(a, &b, table) else { continue };
            codes.iter_mut().for_each(|code| *code = order[usize::from(*code)]);
            self.q[own].iter_mut().zip(codes).for_each(|(q, code)| *q = table[usize::from(*code)]);
        }
    }

    /// Sums H over the pairs of columns with two codes, over all rows of a table: a symmetric `A [codes, codes]` for each table.
    /// ```text
    /// for a strip of columns j:   sums[code of i][j] += H[i][j] for all i behind the strip, then A[code][code of j] += sums[code][j]
    /// ```
    fn products_of_codes(&self) -> Vec<f64> {
        let (n, k) = (self.m.cols, 1usize << self.encoder.quant.kind.bits());
        let size = self.encoder.quant.group * n;
        let mut products = vec![0f64; self.codes.len() / size * k * k];
        let mut sums = vec![[0f32; TABLE_COLUMNS]; k];
        let mut strip = vec![[0f32; TABLE_COLUMNS]; n];
        for first in (0..n).step_by(TABLE_COLUMNS) {
            let width = TABLE_COLUMNS.min(n - first);
            // A pair counts once, its half on the diagonal: the rest is the mirror image.
            for (i, (own, h)) in strip.iter_mut().zip(self.m.h.chunks_exact(n)).enumerate().skip(first) {
                let below = (i - first).min(width);
                own[..below].copy_from_slice(&h[first..first + below]);
                own[below..].fill(0.0);
                if below < width {
                    own[below] = 0.5 * h[i];
                }
            }
            for (codes, a) in self.codes.chunks_exact(size).zip(products.chunks_exact_mut(k * k)) {
                for codes in codes.chunks_exact(n) {
                    sums.fill([0.0; TABLE_COLUMNS]);
                    for (code, h) in codes.iter().zip(&strip).skip(first) {
                        // Sums by value are added as vectors.
                        let before = sums[usize::from(*code)];
                        sums[usize::from(*code)] = array::from_fn(|j| before[j] + h[j]);
                    }
                    for (sums, a) in sums.iter().zip(a.chunks_exact_mut(k)) {
                        for (code, s) in codes[first..first + width].iter().zip(sums) {
                            a[usize::from(*code)] += f64::from(*s);
                        }
                    }
                }
            }
        }
        for a in products.chunks_exact_mut(k * k) {
            for i in 0..k {
                for j in 0..=i {
                    let both = a[i * k + j] + a[j * k + i];
                    (a[i * k + j], a[j * k + i]) = (both, both);
                }
            }
        }
        products
    }
}

/// Replaces a table's entries by those of least cost `c A c' - 2 b c'` that it may hold, ascending, and returns the
/// new codes. Returns `None` where the cost does not fall.
fn refit_table(a: &[f64], b: &[f64], table: &mut [f32]) -> Option<Vec<u8>> {
    let k = table.len();
    // Entries without a code stay as they are.
    let share = 1e-6 * (0..k).map(|i| a[i * k + i]).sum::<f64>() / k as f64;
    let mut l = a.to_vec();
    let mut c: Vec<f64> = b.iter().zip(&*table).map(|(b, t)| b + share * f64::from(*t)).collect();
    for i in 0..k {
        l[i * k + i] += share;
        for j in 0..=i {
            let rest = l[i * k + j] - (0..j).map(|m| l[i * k + m] * l[j * k + m]).sum::<f64>();
            l[i * k + j] = match i == j {
                true if rest > 0.0 => rest.sqrt(),
                true => return None,
                false => rest / l[j * k + j],
            };
        }
        c[i] = (c[i] - (0..i).map(|m| l[i * k + m] * c[m]).sum::<f64>()) / l[i * k + i];
    }
    for i in (0..k).rev() {
        c[i] = (c[i] - (i + 1..k).map(|m| l[m * k + i] * c[m]).sum::<f64>()) / l[i * k + i];
    }
    let mut entries: Vec<f32> = c.iter().map(|v| f16::from_f64(*v).to_f32()).collect();
    // Tables of whole numbers stay such tables: their products are faster.
    if Int16Lut::new(table).is_some() {
        round_to_int16(&mut entries);
    }
    let cost = |c: &[f32]| -> f64 {
        let row = |i: usize| (0..k).map(|j| a[i * k + j] * f64::from(c[j])).sum::<f64>();
        (0..k).map(|i| f64::from(c[i]) * (row(i) - 2.0 * b[i])).sum()
    };
    if entries.iter().any(|v| !v.is_finite()) || cost(&entries) >= cost(table) {
        return None;
    }
    let mut order: Vec<usize> = (0..k).collect();
    order.sort_by(|&i, &j| entries[i].total_cmp(&entries[j]).then(i.cmp(&j)));
    let mut codes = vec![0u8; k];
    for (to, &from) in order.iter().enumerate() {
        table[to] = entries[from];
        codes[from] = to as u8;
    }
    Some(codes)
}

/// A compressed matrix: packed elements, and their tables or scales.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CompressedMatrix {
    /// Packed elements.
    pub packed: Vec<u8>,
    /// Tables, scales and figures.
    pub side: TablesAndScales,
}

impl Encoder<'_> {
    /// Compresses a matrix `[rows, cols]` for inputs with these moments. Kinds without codes to choose, plain fp16 and
    /// MXFP4, are encoded like by [`Encoder::run`].
    ///
    /// # Errors
    /// fp16 cannot hold a value.
    ///
    /// # Panics
    /// Weights or moments have another size.
    pub fn run_with_feedback(
        &self,
        weights: &[f32],
        moments: &SecondMoments,
    ) -> Result<CompressedMatrix, OutsideFp16> {
        assert!(weights.len() == self.rows * self.cols && moments.cols == self.cols);
        let encode = |w: &[f32]| {
            let mut packed = Vec::new();
            let read = |first: usize, out: &mut [f32]| {
                out.copy_from_slice(&w[first * self.cols..][..out.len()]);
                Ok::<(), OutsideFp16>(())
            };
            let side = self.run(&read, &mut |bytes| {
                packed.extend_from_slice(bytes);
                Ok(())
            })?;
            Ok(CompressedMatrix { packed, side })
        };
        let bits = self.quant.kind.bits();
        if matches!(self.quant.kind, Quant::Fp16 | Quant::Mxfp4) {
            return encode(weights);
        }
        let n = self.cols;
        let mut target = moments.arrange(weights);
        moments.aim(&mut target);
        let mut plain = vec![0f32; target.len()];
        for (out, row) in plain.chunks_exact_mut(n).zip(target.chunks_exact(n)) {
            moments.order.iter().zip(row).for_each(|(c, v)| out[*c] = *v);
        }
        let mut side = encode(&plain)?.side;
        let mut values: Vec<f32> = side.values.iter().map(|v| v.to_f32()).collect();
        let mut codes = vec![0u8; target.len()];
        self.compress_tiles(&target, moments, (&mut values, &side.offsets), &mut codes);
        side.values = values.iter().map(|v| f16::from_f32(*v)).collect();
        // Back to the matrix's own order of columns.
        let mut ordered = vec![0u8; codes.len()];
        for (out, row) in ordered.chunks_exact_mut(n).zip(codes.chunks_exact(n)) {
            moments.order.iter().zip(row).for_each(|(c, v)| out[*c] = *v);
        }
        let packed = pack_sub_byte(&ordered, usize::from(bits));
        let decoded = self.decode(&packed, &side).expect("elements and tables of this very matrix");
        side.metrics = Metrics::default();
        let squares = moments.squares();
        for (w, q) in weights.chunks_exact(n).zip(decoded.chunks_exact(n)) {
            side.metrics.add(w, q, Some(&squares));
        }
        Ok(CompressedMatrix { packed, side })
    }

    /// Chooses codes and tables of all rows, tile by tile.
    fn compress_tiles(
        &self,
        target: &[f32],
        m: &SecondMoments,
        (values, offsets): (&mut [f32], &[i8]),
        codes: &mut [u8],
    ) {
        let (block_rows, block_cols) = self.quant.block(self.rows, self.cols);
        let has_tables = matches!(self.quant.kind, Quant::Lut { uniform: false, .. });
        // Values of one group of rows, as they lie in memory.
        let per_group = match self.quant.kind {
            Quant::Lut { bits, .. } => 1usize << bits.bits(),
            _ => self.cols / block_cols,
        };
        let rows = (TILE_ROWS / block_rows).max(1) * block_rows;
        let per_tile = rows / block_rows * per_group;
        let mut tiles = Vec::new();
        for (i, ((target, codes), values)) in target
            .chunks(rows * m.cols)
            .zip(codes.chunks_mut(rows * m.cols))
            .zip(values.chunks_mut(per_tile))
            .enumerate()
        {
            let offsets = offsets.get(i * per_tile..).unwrap_or_default();
            let (target_h, q) = (Vec::new(), Vec::new());
            tiles.push(Mutex::new(RowTile { m, encoder: self, values, offsets, target, target_h, codes, q }));
        }
        Pool::global().run(tiles.len(), &|i| {
            let mut tile = locked(&tiles[i]);
            tile.q = vec![0.0; tile.target.len()];
            tile.feed_back();
            tile.descend();
            if has_tables {
                tile.target_h = product(tile.target, &m.h, m.cols);
            }
            for _ in 0..if has_tables { ROUNDS } else { 0 } {
                tile.refit();
                tile.descend();
            }
            (tile.q, tile.target_h) = Default::default();
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::dense::transposed;
    use super::super::testing::weights;
    use super::*;
    use crate::quant::{Groups, MatrixQuant};

    const N: usize = 160;
    const ROWS: usize = 64;

    /// Makes correlated inputs as columns, `[N, tokens]`: each is a mean of its own and its neighbour's noise.
    fn inputs(seed: u64, tokens: usize) -> Vec<f32> {
        let noise = weights(seed, (N + 1) * tokens, 0);
        let scale = |c: usize| 1.0 + (c % 13) as f32;
        (0..N * tokens).map(|i| scale(i / tokens) * (noise[i] + 0.8 * noise[i + tokens])).collect()
    }

    fn moments(float: &[f32], compressed: &[f32], tokens: usize) -> SecondMoments {
        let mut sums = InputSums::new(N);
        sums.add(float, compressed, tokens);
        SecondMoments::new(sums)
    }

    fn encoder(kind: &str) -> Encoder<'static> {
        let quant = MatrixQuant::resolve(kind.parse().unwrap(), Groups::default(), ROWS, N);
        Encoder::plain(ROWS, N, quant)
    }

    /// Computes the mean squared change of outputs for inputs `[N, tokens]`.
    fn output_error(w: &[f32], x: &[f32], q: &[f32], y: &[f32], tokens: usize) -> f64 {
        let (x, y) = (transposed(x, tokens), transposed(y, tokens));
        let (a, b) = (product(&x, w, N), product(&y, q, N));
        a.iter().zip(&b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>() / a.len() as f64
    }

    const KINDS: [&str; 11] = [
        "lut1",
        "lut2",
        "lut3",
        "lut4",
        "lut6",
        "lut8",
        "lut4-uniform",
        "lut3-tensor",
        "int4-block",
        "int8-channel",
        "int4-channel-asymmetric",
    ];

    #[test]
    fn outputs_change_less_than_with_the_nearest_codes() {
        let (w, x, other) = (weights(1, ROWS * N, 0), inputs(2, 700), inputs(3, 300));
        let m = moments(&x, &x, 700);
        for kind in KINDS {
            let e = encoder(kind);
            let with = e.run_with_feedback(&w, &m).unwrap();
            let read = |first: usize, out: &mut [f32]| {
                out.copy_from_slice(&w[first * N..][..out.len()]);
                Ok::<(), OutsideFp16>(())
            };
            let mut packed = Vec::new();
            let side = e.run(&read, &mut |b| {
                packed.extend_from_slice(b);
                Ok(())
            });
            let side = side.unwrap();
            assert_eq!(packed.len(), with.packed.len(), "{kind}");
            let error = |packed: &[u8], side: &TablesAndScales| {
                output_error(&w, &other, &e.decode(packed, side).unwrap(), &other, 300)
            };
            let (with, without) = (error(&with.packed, &with.side), error(&packed, &side));
            assert!(with < 0.8 * without, "{kind}: {with:e} for {without:e}");
        }
    }

    /// Makes numbers by hashes, about normal: four uniform ones added up.
    fn noise(seed: u64, n: usize) -> Vec<f32> {
        let uniform = |i: u64| {
            let z = i.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z ^ z >> 31) >> 40) as f64 / f64::from(1 << 24) - 0.5
        };
        let one = |i: u64| (0..4).map(|k| uniform(4 * (i + seed * 1_000_003) + k)).sum::<f64>() as f32;
        (0..n as u64).map(one).collect()
    }

    /// Checks the cost against that of a prototype in numpy, in double precision, on the same numbers: k-means alone,
    /// feedback once, and the whole.
    #[test]
    fn the_cost_is_that_of_a_prototype() {
        const T: usize = 700;
        let w: Vec<f32> = noise(1, ROWS * N).iter().map(|v| 0.02 * v).collect();
        let (z, change) = (noise(2, (N + 1) * T), noise(3, N * T));
        let scale = |i: usize| (1 + i / T % 13) as f32;
        let x: Vec<f32> = (0..N * T).map(|i| scale(i) * (z[i] + 0.8 * z[i + T])).collect();
        let y: Vec<f32> = (0..N * T).map(|i| x[i] + 0.1 * scale(i) * change[i]).collect();
        let m = moments(&x, &y, T);
        let mut target = m.arrange(&w);
        m.aim(&mut target);
        for (kind, once, whole) in [
            ("lut2", 0.049_362_5, 0.043_922_7),
            ("lut3", 0.011_945_6, 0.011_097_5),
            ("lut4", 0.003_223_81, 0.003_007_23),
            ("lut6", 0.000_379_484, 0.000_292_517),
        ] {
            let e = encoder(kind);
            let c = e.run_with_feedback(&w, &m).unwrap();
            let q = m.arrange(&e.decode(&c.packed, &c.side).unwrap());
            let error: Vec<f32> = q.iter().zip(&target).map(|(q, t)| q - t).collect();
            let sums = product(&error, &m.h, N);
            let cost: f64 = error.iter().zip(&sums).map(|(e, s)| f64::from(e * s)).sum::<f64>() / ROWS as f64;
            // Tables of sixteen are whole numbers, and k-means starts nearer to its optimum than the prototype's.
            assert!(
                cost < 1.04 * whole && cost > 0.6 * whole && cost < once,
                "{kind}: {cost:e} for {whole:e}"
            );
        }
    }

    #[test]
    fn targets_correct_inputs_that_changed() {
        let (w, x) = (weights(1, ROWS * N, 0), inputs(2, 700));
        // Inputs that come are too small, as behind a layer that lost a tenth of its output.
        let y: Vec<f32> = x.iter().map(|v| 0.9 * v).collect();
        let e = encoder("lut6");
        let error = |m: &SecondMoments| {
            let c = e.run_with_feedback(&w, m).unwrap();
            output_error(&w, &x, &e.decode(&c.packed, &c.side).unwrap(), &y, 700)
        };
        let (corrected, plain) = (error(&moments(&x, &y, 700)), error(&moments(&y, &y, 700)));
        // Half of the way: a quarter of the squared error.
        assert!(corrected < 0.35 * plain, "{corrected:e} for {plain:e}");
    }

    #[test]
    fn threads_and_blocks_do_not_change_the_result() {
        let (w, x) = (weights(1, ROWS * N, 1), inputs(2, 300));
        let m = moments(&x, &x, 300);
        let e = encoder("lut4");
        let all = e.run_with_feedback(&w, &m).unwrap();
        let half = Encoder { rows: ROWS / 2, ..e };
        for (i, w) in w.chunks_exact(ROWS / 2 * N).enumerate() {
            let part = half.run_with_feedback(w, &m).unwrap();
            let n = part.packed.len();
            assert_eq!(part.packed, all.packed[i * n..(i + 1) * n]);
        }
    }

    #[test]
    fn inputs_that_are_zero_are_no_fault() {
        let w = weights(1, ROWS * N, 0);
        for kind in KINDS {
            let e = encoder(kind);
            // No token at all, and one whose last channels are zero.
            let mut x = vec![0f32; N];
            for filled in [0, 5] {
                x[..filled].fill(1.0);
                let c = e.run_with_feedback(&w, &moments(&x, &x, 1)).unwrap();
                assert!(c.side.metrics.cosine() > 0.5, "{kind}: {}", c.side.metrics.cosine());
            }
        }
    }

    #[test]
    fn a_table_keeps_its_entries_where_no_code_uses_them() {
        // Two of four entries are in use: c A c' - 2 b c' is least at (1, _, _, 2).
        let (mut a, mut b) = (vec![0.0; 16], vec![0.0; 4]);
        (a[0], a[15], b[0], b[3]) = (2.0, 4.0, 2.0, 8.0);
        let mut table = [0.5f32, 0.75, 1.25, 1.5];
        let codes = refit_table(&a, &b, &mut table).unwrap();
        assert_eq!((table, codes), ([0.75, 1.0, 1.25, 2.0], vec![1, 0, 2, 3]));
        assert_eq!(refit_table(&a, &b, &mut [1.0, 1.125, 1.25, 2.0]), None);
    }
}
