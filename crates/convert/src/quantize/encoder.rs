//! Compresses a matrix piece by piece: rows are read, quantized, packed and handed on in order, so that neither the
//! matrix nor its compressed form has to fit in memory. Pieces do not depend on the number of threads, so neither
//! does the result.

use super::histogram::{Histogram, order};
use super::integers::{self, Scale};
use super::metrics::Metrics;
use super::mxfp4;
use super::palettize::{LutTable, Palettizer, TableMode};
use crate::quant::{MatrixQuant, Quant};
use anemoe_io::locked;
use anemoe_kernels::{
    Isa, Matrix, MatrixError, ScaleAndZero, Weight, f32_to_f16, find_extremes, quantize_linear, round_to_f16,
};
use anemoe_mlpackage::blob::pack_sub_byte;
use half::f16;
use rayon::prelude::*;
use std::sync::Mutex;

/// Least magnitude that fp16 rounds to infinity: halfway between its largest number, 65504, and the step after it.
pub const ROUNDS_TO_INFINITY: f32 = 65520.0;

/// Weights that one thread works on at a time.
const UNIT_WEIGHTS: usize = 1 << 16;
/// Weights between two writes.
const PIECE_WEIGHTS: usize = 4 << 20;

/// Encoder of a matrix `[rows, cols]`: its kind, and all else that decides its codes besides the weights.
#[derive(Clone, Copy, Debug)]
pub struct Encoder<'a> {
    /// Output channels.
    pub rows: usize,
    /// Input channels.
    pub cols: usize,
    /// Kind of compression; its group divides rows or columns.
    pub quant: MatrixQuant,
    /// True for the global optimum of k-means; otherwise tables are within 1e-4 of it.
    pub exact: bool,
    /// Second moment of every input, `[cols]`.
    pub importance: Option<&'a [f32]>,
    /// Scale that other matrices share; for integers per tensor without offset.
    pub scale: Option<f16>,
}

/// Tables, scales and figures of a matrix whose packed elements have been written.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TablesAndScales {
    /// `[groups, 2^bits]`, or one scale per block, row-major.
    pub values: Vec<f16>,
    /// Offset of each scale, for asymmetric kinds.
    pub offsets: Vec<i8>,
    /// Error of the result against the original.
    pub metrics: Metrics,
}

/// Reader of whole rows as f32, from the given row on.
pub type ReadRows<'a, E> = dyn Fn(usize, &mut [f32]) -> Result<(), E> + Sync + 'a;

/// A value that fp16 cannot hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OutsideFp16 {
    /// Would become infinite.
    TooLarge(f32),
    /// Lies on the lattice of MXFP4, and would leave it.
    TooSmall(f32),
}

impl std::fmt::Display for OutsideFp16 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            OutsideFp16::TooLarge(v) => write!(f, "{v} does not fit fp16"),
            OutsideFp16::TooSmall(v) => write!(
                f,
                "{v:e} does not fit fp16, whose least step is 2^-24: MXFP4 with smaller scales cannot be kept"
            ),
        }
    }
}

/// Memory that a thread works with, kept between units.
struct EncodeWorker {
    /// Weights of a unit, rounded to fp16.
    values: Vec<f32>,
    /// fp16 bits of the weights, or codes in the order of the values.
    bits: Vec<u16>,
    /// Values that indices stand for.
    decoded: Vec<f32>,
    indices: Vec<u8>,
    codes: Vec<i8>,
    grids: Vec<ScaleAndZero>,
    palettizer: Option<Palettizer>,
}

/// A unit's packed elements with its tables or scales.
type Unit = (Vec<u8>, TablesAndScales);

/// Result of a first pass, for kinds with one table or scale per matrix.
enum SharedGrid {
    None,
    Table(Box<LutTable>),
    Scale(Scale),
}

impl Encoder<'_> {
    /// Makes an encoder whose inputs all count the same, without a shared scale.
    pub fn plain(rows: usize, cols: usize, quant: MatrixQuant) -> Self {
        Encoder { rows, cols, quant, exact: false, importance: None, scale: None }
    }

    /// Returns the rows of a unit: whole groups, and whole bytes of packed elements.
    fn unit_rows(&self) -> usize {
        let group = match self.quant.kind {
            Quant::Lut { per_tensor: false, .. } => self.quant.group.max(1),
            _ => 1,
        };
        let unit = group * 8 / gcd(group, 8);
        (UNIT_WEIGHTS / self.cols.max(1) / unit).max(1) * unit
    }

    fn mode(&self) -> TableMode {
        match self.quant.kind {
            Quant::Lut { uniform: true, .. } => TableMode::Uniform,
            _ if self.exact => TableMode::KMeansExact,
            _ => TableMode::KMeans,
        }
    }

    /// Reads the matrix, once or twice, and writes its packed elements in order.
    ///
    /// # Errors
    /// Reading or writing fails, or fp16 cannot hold a value.
    ///
    /// # Panics
    /// The importances are not one per column.
    pub fn run<E: From<OutsideFp16> + Send>(
        &self,
        read: &ReadRows<'_, E>,
        write: &mut dyn FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<TablesAndScales, E> {
        assert!(self.importance.is_none_or(|m| m.len() == self.cols));
        let mut side = TablesAndScales::default();
        let workers = Mutex::new(Vec::new());
        let shared_grid = self.shared_grid(read, &mut side, &workers)?;
        let unit = self.unit_rows();
        let per_piece = (PIECE_WEIGHTS / (unit * self.cols).max(1)).max(1);
        let starts: Vec<usize> = (0..self.rows).step_by(unit).collect();
        for piece in starts.chunks(per_piece) {
            let units: Vec<Result<Unit, E>> = piece
                .par_iter()
                .map(|&first| {
                    let rows = unit.min(self.rows - first);
                    let mut worker = self.worker(&workers);
                    let done = self
                        .load(read, first, rows, &mut worker)
                        .map(|()| self.encode(rows, &shared_grid, &mut worker));
                    give_back(&workers, worker);
                    done
                })
                .collect();
            for done in units {
                let (bytes, part) = done?;
                write(&bytes)?;
                side.values.extend_from_slice(&part.values);
                side.offsets.extend_from_slice(&part.offsets);
                side.metrics.merge(&part.metrics);
            }
        }
        Ok(side)
    }

    fn worker(&self, workers: &Mutex<Vec<EncodeWorker>>) -> EncodeWorker {
        if let Some(worker) = locked(workers).pop() {
            return worker;
        }
        let palettizer = match self.quant.kind {
            Quant::Lut { bits, per_tensor: false, .. } => Some(Palettizer::new(bits.bits(), self.mode())),
            _ => None,
        };
        EncodeWorker {
            values: Vec::new(),
            bits: Vec::new(),
            decoded: Vec::new(),
            indices: Vec::new(),
            codes: Vec::new(),
            grids: Vec::new(),
            palettizer,
        }
    }

    /// Reads rows and rounds them to fp16: into `values` for kinds with scales, into `bits` for the others.
    fn load<E: From<OutsideFp16>>(
        &self,
        read: &ReadRows<'_, E>,
        first: usize,
        rows: usize,
        worker: &mut EncodeWorker,
    ) -> Result<(), E> {
        let n = rows * self.cols;
        worker.values.resize(n, 0.0);
        read(first, &mut worker.values)?;
        let (low, high) = find_extremes(Isa::best(), &worker.values);
        if high.max(-low) >= ROUNDS_TO_INFINITY {
            let large = worker.values.iter().find(|v| v.abs() >= ROUNDS_TO_INFINITY);
            return Err(OutsideFp16::TooLarge(large.copied().unwrap_or(high)).into());
        }
        match self.quant.kind {
            Quant::Int { .. } => round_to_f16(&mut worker.values),
            Quant::Mxfp4 => {
                let blocks = worker.values.chunks_exact(self.quant.group.max(1));
                if let Some(v) = blocks.filter_map(mxfp4::lost_by_fp16).next() {
                    return Err(OutsideFp16::TooSmall(v).into());
                }
                round_to_f16(&mut worker.values);
            }
            Quant::Lut { .. } | Quant::Fp16 => {
                worker.bits.resize(n, 0);
                f32_to_f16(&worker.values, &mut worker.bits);
            }
        }
        Ok(())
    }

    /// Finds the one table or scale of a kind per tensor and adds it to `side`; none for other kinds.
    fn shared_grid<E: From<OutsideFp16> + Send>(
        &self,
        read: &ReadRows<'_, E>,
        side: &mut TablesAndScales,
        workers: &Mutex<Vec<EncodeWorker>>,
    ) -> Result<SharedGrid, E> {
        if !self.quant.kind.is_per_tensor() {
            return Ok(SharedGrid::None);
        }
        if let (Some(scale), Quant::Int { asymmetric: false, .. }) = (self.scale, self.quant.kind) {
            side.values.push(scale);
            return Ok(SharedGrid::Scale(Scale { scale, offset: 0 }));
        }
        // A few large parts, each summed by one thread and then joined in order: sums of importances depend on the order.
        let unit = self.unit_rows();
        let units = self.rows.div_ceil(unit);
        let per_part = units.div_ceil(32).max(1);
        let parts: Vec<Result<Histogram, E>> = (0..units.div_ceil(per_part))
            .into_par_iter()
            .map(|part| {
                let mut worker = self.worker(workers);
                let mut h = Histogram::default();
                for i in part * per_part..((part + 1) * per_part).min(units) {
                    let first = i * unit;
                    self.load(read, first, unit.min(self.rows - first), &mut worker)?;
                    if matches!(self.quant.kind, Quant::Int { .. }) {
                        worker.bits.resize(worker.values.len(), 0);
                        f32_to_f16(&worker.values, &mut worker.bits);
                    }
                    let range = order(&mut worker.bits);
                    h.count(&worker.bits, range, self.importance);
                }
                give_back(workers, worker);
                Ok(h)
            })
            .collect();
        let mut all = Histogram::default();
        for part in parts {
            all.join(&part?);
        }
        all.collect();
        match self.quant.kind {
            Quant::Lut { bits, .. } => {
                let mut table = LutTable::new();
                table.fit(&all, bits.bits(), self.mode(), &mut side.metrics);
                side.values.extend_from_slice(&table.values);
                Ok(SharedGrid::Table(Box::new(table)))
            }
            Quant::Int { bits, asymmetric, .. } => {
                let masses: Vec<f32> = (0..all.values().len()).map(|i| all.mass(i) as f32).collect();
                let scale = integers::fit(all.values(), Some(&masses), bits.bits(), asymmetric);
                side.values.push(scale.scale);
                if asymmetric {
                    side.offsets.push(scale.offset);
                }
                Ok(SharedGrid::Scale(scale))
            }
            Quant::Mxfp4 | Quant::Fp16 => Ok(SharedGrid::None),
        }
    }

    fn encode(&self, rows: usize, shared_grid: &SharedGrid, worker: &mut EncodeWorker) -> Unit {
        let n = rows * self.cols;
        let mut side = TablesAndScales::default();
        match self.quant.kind {
            Quant::Fp16 => (worker.bits.iter().flat_map(|b| b.to_le_bytes()).collect(), side),
            Quant::Lut { bits, .. } => {
                worker.indices.resize(n, 0);
                match (shared_grid, &mut worker.palettizer) {
                    (SharedGrid::Table(table), _) => {
                        order(&mut worker.bits);
                        table.assign(&worker.bits, &mut worker.indices);
                    }
                    (_, Some(palettizer)) => {
                        let size = (self.quant.group * self.cols).max(1);
                        for (group, indices) in
                            worker.bits.chunks_mut(size).zip(worker.indices.chunks_mut(size))
                        {
                            let table = palettizer.codes(group, self.importance, indices, &mut side.metrics);
                            side.values.extend_from_slice(table);
                        }
                    }
                    _ => unreachable!(
                        "tables per group have a palettizer, others one table or scale for everything"
                    ),
                }
                (pack_sub_byte(&worker.indices, usize::from(bits.bits())), side)
            }
            Quant::Mxfp4 => {
                self.encode_mxfp4(worker, &mut side);
                (pack_sub_byte(&worker.indices, 4), side)
            }
            Quant::Int { bits, asymmetric, .. } => {
                let isa = Isa::best();
                worker.codes.resize(n, 0);
                let width = self.quant.block(self.rows, self.cols).1.max(1);
                // Codes are made for whole rows at a time, since importances belong to columns.
                let cols = self.cols.max(1);
                for (values, codes) in
                    worker.values.chunks_exact(cols).zip(worker.codes.chunks_exact_mut(cols))
                {
                    worker.grids.clear();
                    for (i, values) in values.chunks_exact(width).enumerate() {
                        let importance = self.importance.map(|m| &m[i * width..(i + 1) * width]);
                        let scale = match shared_grid {
                            SharedGrid::Scale(scale) => *scale,
                            _ => {
                                let scale = integers::fit(values, importance, bits.bits(), asymmetric);
                                side.values.push(scale.scale);
                                if asymmetric {
                                    side.offsets.push(scale.offset);
                                }
                                scale
                            }
                        };
                        let zero = f32::from(scale.offset);
                        worker.grids.push(ScaleAndZero { scale: scale.scale.to_f32(), zero });
                    }
                    let sums =
                        quantize_linear(isa, values, self.importance, &worker.grids, bits.bits(), codes);
                    side.metrics.add_sums(cols, &sums);
                }
                worker.indices.clear();
                worker.indices.extend(worker.codes.iter().map(|&c| c as u8));
                (pack_sub_byte(&worker.indices, usize::from(bits.bits())), side)
            }
        }
    }

    /// Encodes the rows of `worker.values` as MXFP4.
    fn encode_mxfp4(&self, worker: &mut EncodeWorker, side: &mut TablesAndScales) {
        let (cols, width) = (self.cols.max(1), self.quant.group.max(1));
        worker.indices.resize(worker.values.len(), 0);
        worker.decoded.resize(cols, 0.0);
        for (values, indices) in worker.values.chunks_exact(cols).zip(worker.indices.chunks_exact_mut(cols)) {
            let blocks = values.chunks_exact(width).zip(indices.chunks_exact_mut(width));
            for (i, ((values, indices), decoded)) in
                blocks.zip(worker.decoded.chunks_exact_mut(width)).enumerate()
            {
                let importance = self.importance.map(|m| &m[i * width..(i + 1) * width]);
                side.values.push(mxfp4::encode(values, importance, indices, decoded));
            }
            side.metrics.add(values, &worker.decoded, self.importance);
        }
    }

    /// Decodes packed elements with their tables or scales to values, `[rows, cols]`.
    ///
    /// # Errors
    /// The lengths of elements, tables or scales do not fit the matrix.
    pub fn decode(&self, packed: &[u8], side: &TablesAndScales) -> Result<Vec<f32>, MatrixError> {
        let mut out = vec![0f32; self.rows * self.cols];
        let values: Vec<f32> = side.values.iter().map(|v| v.to_f32()).collect();
        let offsets: Vec<f32> = side.offsets.iter().map(|&o| f32::from(o)).collect();
        let format = self.quant.format(self.rows, self.cols);
        let weight = Weight {
            format,
            elements: packed,
            values: format.has_values().then_some(values.as_slice()),
            offsets: format.has_offsets().then_some(offsets.as_slice()),
        };
        Matrix::new(weight, self.rows, self.cols)?.to_dense(&mut out);
        if matches!(self.quant.kind, Quant::Int { .. }) {
            // The program's weights are fp16: it rounds the products of integers and scales.
            round_to_f16(&mut out);
        }
        Ok(out)
    }
}

/// Returns a worker's memory to the pool, for the next unit.
fn give_back(workers: &Mutex<Vec<EncodeWorker>>, worker: EncodeWorker) {
    locked(workers).push(worker);
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{KINDS, weights};
    use super::*;
    use crate::quant::{Groups, NAMES};
    use anemoe_bundle::IndexBits;
    use proptest::prelude::*;

    fn encode(encoder: &Encoder<'_>, w: &[f32]) -> (Vec<u8>, TablesAndScales) {
        let mut packed = Vec::new();
        let cols = encoder.cols;
        let read = |first: usize, out: &mut [f32]| {
            out.copy_from_slice(&w[first * cols..][..out.len()]);
            Ok::<(), OutsideFp16>(())
        };
        let side = encoder
            .run(&read, &mut |b| {
                packed.extend_from_slice(b);
                Ok(())
            })
            .unwrap();
        (packed, side)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Checks that encoded bytes decode to values with the reported error, in as many bytes as planned.
        #[test]
        fn figures_are_those_of_the_decoded_matrix(
            rows in 1usize..70, cols in 1usize..90, group in 1usize..40, kind in 0..KINDS, name in prop::sample::select(NAMES.to_vec()),
            seed in 0u64..1000, weighted in any::<bool>(),
        ) {
            let quant: Quant = name.parse().unwrap();
            let quant = MatrixQuant::resolve(quant, Groups { rows: group, block: group }, rows, cols);
            let w: Vec<f32> = weights(seed, rows * cols, kind).iter().map(|&v| f16::from_f32(v).to_f32()).collect();
            let importance: Vec<f32> = (0..cols).map(|c| (c % 7) as f32 * 0.3).collect();
            let importance = weighted.then_some(importance.as_slice());
            let encoder = Encoder { importance, ..Encoder::plain(rows, cols, quant) };
            let (packed, side) = encode(&encoder, &w);
            let offset_bytes = (side.offsets.len() * usize::from(quant.kind.bits())).div_ceil(8);
            prop_assert_eq!((packed.len() + 2 * side.values.len() + offset_bytes) as u64, quant.bytes(rows, cols));
            let decoded = encoder.decode(&packed, &side).unwrap();
            let mse = w.iter().zip(&decoded).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>() / w.len() as f64;
            let scale = w.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / w.len() as f64;
            if quant.kind == Quant::Fp16 {
                prop_assert_eq!(decoded, w);
            } else {
                prop_assert!((side.metrics.mse() - mse).abs() <= 2e-2 * mse + 1e-6 * scale, "{} for {}", side.metrics.mse(), mse);
                prop_assert_eq!(side.metrics.count, (rows * cols) as u64);
                prop_assert!(side.values.iter().all(|v| v.is_finite()));
            }
        }
    }

    #[test]
    fn threads_do_not_change_the_result() {
        let w = weights(5, 256 * 300, 1);
        let importance: Vec<f32> = (0..300).map(|c| 0.1 + (c % 11) as f32).collect();
        for name in NAMES {
            let quant = MatrixQuant::resolve(name.parse().unwrap(), Groups::default(), 256, 300);
            let encoder = Encoder { importance: Some(&importance), ..Encoder::plain(256, 300, quant) };
            let with = |threads: usize| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| encode(&encoder, &w))
            };
            assert_eq!(with(1), with(5), "{name}");
        }
    }

    #[test]
    fn importance_lowers_the_weighted_error() {
        let w = weights(9, 64 * 512, 0);
        let importance: Vec<f32> = (0..512).map(|c| if c % 16 == 0 { 100.0 } else { 0.1 }).collect();
        for name in ["lut2", "lut4", "lut4-tensor", "int4-block", "lut6", "lut4-uniform", "mxfp4"] {
            let quant = MatrixQuant::resolve(name.parse().unwrap(), Groups::default(), 64, 512);
            let plain = Encoder::plain(64, 512, quant);
            let encoder = Encoder { importance: Some(&importance), ..plain };
            let weighted_error = |e: &Encoder<'_>| {
                let (packed, side) = encode(e, &w);
                let decoded = e.decode(&packed, &side).unwrap();
                w.iter()
                    .zip(&decoded)
                    .enumerate()
                    .map(|(i, (a, b))| f64::from(importance[i % 512] * (a - b).powi(2)))
                    .sum::<f64>()
            };
            let (with, without) = (weighted_error(&encoder), weighted_error(&plain));
            assert!(with < without, "{name}: {with} for {without}");
        }
    }

    #[test]
    fn a_value_beyond_fp16_is_named() {
        let quant = MatrixQuant::resolve(Quant::lut(IndexBits::Four), Groups::default(), 32, 32);
        let encoder = Encoder::plain(32, 32, quant);
        let read = |_: usize, out: &mut [f32]| {
            out.fill(1e6);
            Ok::<(), OutsideFp16>(())
        };
        assert_eq!(encoder.run(&read, &mut |_| Ok(())).unwrap_err(), OutsideFp16::TooLarge(1e6));
    }
}
