//! Tensors under other names and in other layouts than the checkpoint's own.
//!
//! A family names each of its tensors and where the elements lie. Nothing is copied: a range of a derived tensor is
//! read from the ranges that hold it.

use super::{Checkpoint, Dtype, SideFile, TensorInfo, TensorSource, place_of};
use crate::{Error, Result};
use anemoe_io::locked;
use anemoe_kernels::MXFP4_TABLE;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Place of a tensor's elements in the checkpoint's own tensors.
#[derive(Clone, Debug, PartialEq)]
pub enum TensorOrigin {
    /// One tensor of the same shape.
    Whole(String),
    /// Tensors of equal size that lie one behind the other along the first axes: one for each expert, or gate and up of
    /// each expert in turn.
    Pieces(Vec<String>),
    /// A tensor `[E, cols, rows]` whose last two axes are swapped, and whose rows are then sorted by their remainder
    /// modulo `interleaved`. 1 leaves them as they are; 2 puts gate rows 0, 2, 4, ... before up rows 1, 3, 5, ...
    Transposed {
        /// Name in the checkpoint.
        name: String,
        /// Kinds of rows that take turns.
        interleaved: usize,
    },
    /// A tensor `[E, rows]` or `[E, rows, cols]` whose rows are sorted by their remainder modulo `interleaved`.
    Sorted {
        /// Name in the checkpoint.
        name: String,
        /// Kinds of rows that take turns.
        interleaved: usize,
    },
    /// MXFP4 in bytes, whose rows are sorted likewise:
    ///
    /// ```text
    /// blocks  [E, rows, cols / 32, 16]   two elements a byte, the low nibble first
    /// scales  [E, rows, cols / 32]       e: its block's elements are times 2^(e - 127)
    /// ```
    Mxfp4 {
        /// Name of the elements.
        blocks: String,
        /// Name of the powers of two.
        scales: String,
        /// Kinds of rows that take turns.
        interleaved: usize,
    },
}

/// A tensor under its canonical name.
#[derive(Clone, Debug, PartialEq)]
pub struct DerivedTensor {
    /// Canonical name.
    pub name: String,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// Place of the elements.
    pub origin: TensorOrigin,
}

/// Gives a checkpoint's tensors other names and layouts.
///
/// # Errors
/// A source tensor is missing, of another shape or of another type; or a tensor is superfluous, which no origin names
/// and `ignored` does not know.
pub fn derive(
    checkpoint: Checkpoint,
    tensors: Vec<DerivedTensor>,
    ignored: impl Fn(&str) -> bool,
) -> Result<Checkpoint> {
    let source = Box::new(Derived::new(checkpoint.source, tensors, ignored)?);
    Ok(Checkpoint { source, ..checkpoint })
}

/// Elements of a block of MXFP4, and its bytes without the scale.
const MXFP4_BLOCK: u64 = 32;
const MXFP4_BYTES: u64 = 16;
/// E8M0's NaN.
const NO_SCALE: u8 = 255;
/// Blocks of MXFP4 that are decoded at a time: 16 KiB of elements.
const MXFP4_AT_ONCE: u64 = 1 << 10;

/// Most elements of a tile of a transposed tensor: 1 MiB in f32.
const TILE: u64 = 1 << 18;
/// Most columns of a tile, so that 64 rows or more lie side by side in the source.
const TILE_COLS: u64 = 1 << 12;
/// Columns whose source runs are read before their rows are written: one cache line of every row.
const RUNS: usize = 16;

/// Matrices `[rows, cols]`, one behind the other, whose rows lie in another order in the source.
#[derive(Clone, Copy, Debug)]
struct RowOrder {
    rows: u64,
    cols: u64,
    interleaved: u64,
}

impl RowOrder {
    /// Returns expert, row and column of an element; none in a tensor without elements.
    fn place(&self, element: u64) -> Option<(u64, u64, u64)> {
        let per_expert = self.rows * self.cols;
        let within = element.checked_rem(per_expert)?;
        Some((element / per_expert, within / self.cols, within % self.cols))
    }

    /// Returns the rows of one kind.
    fn rows_of_kind(&self) -> u64 {
        self.rows / self.interleaved
    }

    /// Returns the source's row for a row.
    fn source_row(&self, row: u64) -> u64 {
        let kind = self.rows_of_kind();
        row % kind * self.interleaved + row / kind
    }
}

/// Checked place of a derived tensor's elements.
enum Place {
    /// Names of the pieces in order, and elements of one piece.
    Pieces { names: Vec<String>, elements: u64 },
    /// The source is `[E, cols, rows]`.
    Transposed { name: String, order: RowOrder },
    /// The source is `[E, rows, cols]`.
    Sorted { name: String, order: RowOrder },
    /// The source has blocks and scales.
    Mxfp4 { blocks: String, scales: String, order: RowOrder },
}

/// Tensors of another source under other names.
struct Derived {
    inner: Box<dyn TensorSource>,
    tensors: Vec<TensorInfo>,
    places: Vec<Place>,
    tiles: Tiles,
}

/// Checks of a tensor's sources.
struct DerivedSources<'a, 'd> {
    inner: &'a dyn TensorSource,
    /// Name of the derived tensor.
    name: &'d str,
}

impl<'a> DerivedSources<'a, '_> {
    /// Finds a source tensor of this shape.
    fn find(&self, name: &str, shape: &[u64]) -> Result<&'a TensorInfo> {
        let path = self.inner.path();
        let info = self.inner.info(name).ok_or_else(|| {
            Error::invalid(path, format!("checkpoint: tensor `{name}` {shape:?} is missing"))
        })?;
        if info.shape != shape {
            let what = format!("tensor `{name}`: shape {:?}, expected {shape:?}", info.shape);
            return Err(Error::invalid(&info.file, what));
        }
        Ok(info)
    }

    /// Finds a source tensor of this shape that holds weights.
    fn weight(&self, name: &str, shape: &[u64]) -> Result<&'a TensorInfo> {
        let info = self.find(name, shape)?;
        info.check_weight()?;
        Ok(info)
    }

    /// Finds a source tensor of this shape that holds bytes.
    fn bytes(&self, name: &str, shape: &[u64]) -> Result<&'a TensorInfo> {
        let info = self.find(name, shape)?;
        if info.dtype != Dtype::U8 {
            let dtype = info.dtype.name().to_uppercase();
            let what = format!("tensor `{name}`: dtype {dtype}, expected U8");
            return Err(Error::unsupported(&info.file, what));
        }
        Ok(info)
    }

    /// Makes the error for an origin that does not fit the derived tensor's shape.
    fn misfit(&self, shape: &[u64], what: &str) -> Error {
        Error::invalid(self.inner.path(), format!("tensor `{}`: shape {shape:?} {what}", self.name))
    }

    /// Returns the order of `rows` of `cols` elements.
    fn order(&self, shape: &[u64], [rows, cols]: [u64; 2], interleaved: usize) -> Result<RowOrder> {
        let order = RowOrder { rows, cols, interleaved: interleaved as u64 };
        if interleaved == 0 || !rows.is_multiple_of(order.interleaved) {
            let what = format!("has {rows} rows, expected a multiple of {interleaved}");
            return Err(self.misfit(shape, &what));
        }
        // A tensor without elements has any dimensions.
        rows.checked_mul(cols).ok_or_else(|| self.misfit(shape, "is too large"))?;
        Ok(order)
    }

    /// Returns the shape of one of `n` pieces along the first axes.
    fn piece_shape(&self, shape: &[u64], n: u64) -> Result<Vec<u64>> {
        let split = |shape: &[u64], n: u64| match shape {
            _ if n == 1 => Some(shape.to_vec()),
            [first, rest @ ..] if n > 0 && first.is_multiple_of(n) => Some([&[first / n], rest].concat()),
            _ => None,
        };
        let found = match shape {
            [first, rest @ ..] if *first > 0 && n.is_multiple_of(*first) => split(rest, n / first),
            all => split(all, n),
        };
        found.filter(|_| n > 0).ok_or_else(|| self.misfit(shape, &format!("is not that of {n} equal pieces")))
    }

    /// Checks the sources; returns the place of the elements, their type, and the tensors that hold them.
    fn place(&self, shape: &[u64], origin: TensorOrigin) -> Result<(Place, Dtype, Vec<&'a TensorInfo>)> {
        if shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d)).is_none() {
            return Err(self.misfit(shape, "is too large"));
        }
        Ok(match origin {
            TensorOrigin::Whole(name) => {
                let info = self.weight(&name, shape)?;
                (Place::Pieces { names: vec![name], elements: info.elements() }, info.dtype, vec![info])
            }
            TensorOrigin::Pieces(names) => {
                let piece = self.piece_shape(shape, names.len() as u64)?;
                let infos = names.iter().map(|name| self.weight(name, &piece)).collect::<Result<Vec<_>>>()?;
                let elements = infos[0].elements();
                (Place::Pieces { names, elements }, infos[0].dtype, infos)
            }
            TensorOrigin::Transposed { name, interleaved } => {
                let &[experts, rows, cols] = shape else {
                    return Err(self.misfit(shape, "has not three dimensions"));
                };
                let info = self.weight(&name, &[experts, cols, rows])?;
                let order = self.order(shape, [rows, cols], interleaved)?;
                (Place::Transposed { name, order }, info.dtype, vec![info])
            }
            TensorOrigin::Sorted { name, interleaved } => {
                let (rows, cols) = match *shape {
                    [_, rows] => (rows, 1),
                    [_, rows, cols] => (rows, cols),
                    _ => return Err(self.misfit(shape, "has not two or three dimensions")),
                };
                let info = self.weight(&name, shape)?;
                let order = self.order(shape, [rows, cols], interleaved)?;
                (Place::Sorted { name, order }, info.dtype, vec![info])
            }
            TensorOrigin::Mxfp4 { blocks, scales, interleaved } => {
                let &[experts, rows, cols] = shape else {
                    return Err(self.misfit(shape, "has not three dimensions"));
                };
                if !cols.is_multiple_of(MXFP4_BLOCK) {
                    let what = format!("has rows of {cols} elements, expected a multiple of {MXFP4_BLOCK}");
                    return Err(self.misfit(shape, &what));
                }
                let per_row = cols / MXFP4_BLOCK;
                let infos = vec![
                    self.bytes(&blocks, &[experts, rows, per_row, MXFP4_BYTES])?,
                    self.bytes(&scales, &[experts, rows, per_row])?,
                ];
                let order = self.order(shape, [rows, cols], interleaved)?;
                (Place::Mxfp4 { blocks, scales, order }, Dtype::Mxfp4, infos)
            }
        })
    }
}

impl Derived {
    fn new(
        inner: Box<dyn TensorSource>,
        tensors: Vec<DerivedTensor>,
        ignored: impl Fn(&str) -> bool,
    ) -> Result<Derived> {
        let mut found: BTreeMap<String, (TensorInfo, Place)> = BTreeMap::new();
        let mut known: BTreeSet<&str> = BTreeSet::new();
        for DerivedTensor { name, shape, origin } in tensors {
            let sources = DerivedSources { inner: inner.as_ref(), name: &name };
            let (place, dtype, infos) = sources.place(&shape, origin)?;
            known.extend(infos.iter().map(|info| info.name.as_str()));
            let info = TensorInfo {
                name: name.clone(),
                dtype,
                shape,
                bytes: infos.iter().map(|info| info.bytes).sum(),
                file: infos[0].file.clone(),
            };
            if let Some((twice, _)) = found.insert(name, (info, place)) {
                let what = format!("use: tensor `{}` is derived twice", twice.name);
                return Err(Error::invalid(inner.path(), what));
            }
        }
        let is_extra = |t: &&TensorInfo| !known.contains(t.name.as_str()) && !ignored(&t.name);
        if let Some(info) = inner.tensors().iter().find(is_extra) {
            let what = format!("tensor `{}`: this model has none of that name", info.name);
            return Err(Error::invalid(&info.file, what));
        }
        let (tensors, places) = found.into_values().unzip();
        Ok(Derived { inner, tensors, places, tiles: Tiles { elements: TILE, kept: Mutex::default() } })
    }
}

/// Reads pieces that lie one behind the other.
fn read_pieces(
    inner: &dyn TensorSource,
    names: &[String],
    elements: u64,
    start: u64,
    mut out: &mut [f32],
) -> Result<()> {
    let mut at = start;
    while !out.is_empty() {
        let (piece, within) = ((at / elements) as usize, at % elements);
        let n = (out.len() as u64).min(elements - within);
        let (now, later) = out.split_at_mut(n as usize);
        inner.read(&names[piece], within..within + n, now)?;
        at += n;
        out = later;
    }
    Ok(())
}

/// Hands out the parts of a range that lie within one row and at most `most` elements: the part's first element in a
/// source whose rows are as long, and the buffer for it.
fn for_each_part(
    order: RowOrder,
    most: u64,
    start: u64,
    mut out: &mut [f32],
    mut read: impl FnMut(u64, &mut [f32]) -> Result<()>,
) -> Result<()> {
    let mut at = start;
    while !out.is_empty() {
        let Some((expert, row, col)) = order.place(at) else { return Ok(()) };
        let n = (out.len() as u64).min(order.cols - col).min(most);
        let (now, later) = out.split_at_mut(n as usize);
        read((expert * order.rows + order.source_row(row)) * order.cols + col, now)?;
        at += n;
        out = later;
    }
    Ok(())
}

/// Reads rows in another order.
fn read_sorted(
    inner: &dyn TensorSource,
    name: &str,
    order: RowOrder,
    start: u64,
    out: &mut [f32],
) -> Result<()> {
    if order.interleaved == 1 {
        return inner.read(name, start..start + out.len() as u64, out);
    }
    for_each_part(order, u64::MAX, start, out, |from, part| {
        inner.read(name, from..from + part.len() as u64, part)
    })
}

/// Names of MXFP4's tensors.
#[derive(Clone, Copy)]
struct Mxfp4Bytes<'a> {
    blocks: &'a str,
    scales: &'a str,
}

impl Mxfp4Bytes<'_> {
    /// Reads rows in another order.
    fn read(self, inner: &dyn TensorSource, order: RowOrder, start: u64, out: &mut [f32]) -> Result<()> {
        let (mut bytes, mut scales) = (Vec::new(), Vec::new());
        for_each_part(order, MXFP4_BLOCK * MXFP4_AT_ONCE, start, out, |from, part| {
            let end = from + part.len() as u64;
            let first = from / MXFP4_BLOCK;
            let blocks = first..end.div_ceil(MXFP4_BLOCK);
            let n = (blocks.end - blocks.start) as usize;
            bytes.resize(n * MXFP4_BYTES as usize, 0);
            scales.resize(n, 0);
            inner.read_bytes(
                self.blocks,
                blocks.start * MXFP4_BYTES..blocks.end * MXFP4_BYTES,
                &mut bytes,
            )?;
            inner.read_bytes(self.scales, blocks, &mut scales)?;
            let mut skip = (from % MXFP4_BLOCK) as usize;
            let mut rest = part;
            for (i, (bytes, &e)) in bytes.as_chunks().0.iter().zip(&scales).enumerate() {
                let block = self.block(inner, first + i as u64, bytes, e)?;
                let n = rest.len().min(block.len() - skip);
                let (now, later) = rest.split_at_mut(n);
                now.copy_from_slice(&block[skip..skip + n]);
                (skip, rest) = (0, later);
            }
            Ok(())
        })
    }

    /// Decodes block `i`.
    fn block(
        self,
        inner: &dyn TensorSource,
        i: u64,
        bytes: &[u8; MXFP4_BYTES as usize],
        e: u8,
    ) -> Result<[f32; MXFP4_BLOCK as usize]> {
        // 2^-127 is subnormal.
        let scale = f32::from_bits(if e == 0 { 1 << 22 } else { u32::from(e) << 23 });
        let mut out = [0f32; MXFP4_BLOCK as usize];
        for (pair, b) in out.as_chunks_mut::<2>().0.iter_mut().zip(bytes) {
            *pair = [b & 15, b >> 4].map(|bits| MXFP4_TABLE[usize::from(bits)] * scale);
        }
        let overflows = e >= NO_SCALE - 2 && out.iter().any(|v| !v.is_finite());
        if e == NO_SCALE || overflows {
            let (file, name) = inner.origin(self.scales, i);
            let says = if e == NO_SCALE { "NaN in E8M0" } else { "a power of 2 too large for its block" };
            return Err(Error::invalid(file, format!("tensor `{name}`: element {i} is {e}, {says}")));
        }
        Ok(out)
    }
}

/// Tile of a transposed tensor: tensor, expert, first row and first column.
type TileKey = (usize, u64, u64, u64);
/// Elements of a tile, `[rows, cols]`; none until they are read.
type TransposedTile = Arc<Mutex<Option<Arc<[f32]>>>>;

/// Tiles of transposed tensors that were read last. Readers take rows one after the other, each of which is spread over
/// the whole source; of a tile, the source is read once.
struct Tiles {
    /// Most elements of a tile.
    elements: u64,
    /// The last one used is at the end.
    kept: Mutex<Vec<(TileKey, TransposedTile)>>,
}

impl Tiles {
    /// Returns a tile, which `read` reads where it is not there.
    fn get(&self, key: TileKey, read: impl FnOnce() -> Result<Vec<f32>>) -> Result<Arc<[f32]>> {
        let tile = {
            let mut kept = locked(&self.kept);
            let tile = match kept.iter().position(|(k, _)| *k == key) {
                Some(i) => kept.remove(i).1,
                None => TransposedTile::default(),
            };
            kept.push((key, Arc::clone(&tile)));
            // Two for each thread that reads.
            if kept.len() > 2 * rayon::current_num_threads().max(2) {
                kept.remove(0);
            }
            tile
        };
        let mut elements = locked(&tile);
        match &*elements {
            Some(there) => Ok(Arc::clone(there)),
            None => Ok(Arc::clone(elements.insert(read()?.into()))),
        }
    }
}

impl Derived {
    /// Reads a tensor whose source is transposed, tile by tile.
    fn read_transposed(
        &self,
        (tensor, name): (usize, &str),
        order: RowOrder,
        start: u64,
        mut out: &mut [f32],
    ) -> Result<()> {
        let cols = order.cols.min(TILE_COLS);
        let rows = (self.tiles.elements / cols.max(1)).max(1);
        let mut at = start;
        let mut held: Option<(TileKey, Arc<[f32]>)> = None;
        while !out.is_empty() {
            let Some((expert, row, col)) = order.place(at) else { return Ok(()) };
            let (first_row, first_col) = (row / rows * rows, col / cols * cols);
            let tile_rows = first_row..(first_row + rows).min(order.rows);
            let tile_cols = first_col..(first_col + cols).min(order.cols);
            let width = tile_cols.end - first_col;
            let key = (tensor, expert, first_row, first_col);
            let tile = match held {
                Some((k, tile)) if k == key => tile,
                _ => self.tiles.get(key, || {
                    gather(self.inner.as_ref(), name, order, expert, tile_rows.clone(), tile_cols.clone())
                })?,
            };
            // Whole rows of a tile as wide as the tensor lie side by side.
            let within = (row - first_row) * width + col - first_col;
            let there = match width == order.cols {
                true => tile.len() as u64 - within,
                false => tile_cols.end - col,
            };
            let n = (out.len() as u64).min(there);
            let (now, later) = out.split_at_mut(n as usize);
            now.copy_from_slice(&tile[within as usize..(within + n) as usize]);
            held = Some((key, tile));
            at += n;
            out = later;
        }
        Ok(())
    }
}

/// Reads rows and columns of one expert of a source `[E, cols, rows]`.
fn gather(
    inner: &dyn TensorSource,
    name: &str,
    order: RowOrder,
    expert: u64,
    rows: Range<u64>,
    cols: Range<u64>,
) -> Result<Vec<f32>> {
    let width = (cols.end - cols.start) as usize;
    let mut out = vec![0f32; (rows.end - rows.start) as usize * width];
    let mut runs: Vec<f32> = Vec::new();
    let mut first = rows.start;
    while first < rows.end {
        // Rows of one kind are `interleaved` elements apart in the source.
        let kind = order.rows_of_kind();
        let end = rows.end.min((first / kind + 1) * kind);
        let source = order.source_row(first)..order.source_row(end - 1) + 1;
        let run = (source.end - source.start) as usize;
        let part = &mut out[(first - rows.start) as usize * width..(end - rows.start) as usize * width];
        for (i, chunk) in (cols.start..cols.end).step_by(RUNS).enumerate() {
            let n = RUNS.min((cols.end - chunk) as usize);
            runs.resize(n * run, 0.0);
            for (col, buffer) in (chunk..).zip(runs.chunks_exact_mut(run)) {
                let from = (expert * order.cols + col) * order.rows;
                inner.read(name, from + source.start..from + source.end, buffer)?;
            }
            for (r, row) in part.chunks_exact_mut(width).enumerate() {
                let at = r * order.interleaved as usize;
                for (c, o) in row[i * RUNS..][..n].iter_mut().enumerate() {
                    *o = runs[c * run + at];
                }
            }
        }
        first = end;
    }
    Ok(out)
}

impl TensorSource for Derived {
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn path(&self) -> &Path {
        self.inner.path()
    }

    fn files(&self) -> BTreeSet<PathBuf> {
        self.inner.files()
    }

    fn read(&self, name: &str, range: Range<u64>, out: &mut [f32]) -> Result<()> {
        let i = place_of(&self.tensors, name)
            .ok_or_else(|| Error::invalid(self.path(), format!("use: no tensor `{name}`")))?;
        self.tensors[i].check_range(&range, out.len())?;
        let (inner, start) = (self.inner.as_ref(), range.start);
        match &self.places[i] {
            Place::Pieces { names, elements } => read_pieces(inner, names, *elements, start, out),
            Place::Sorted { name, order } => read_sorted(inner, name, *order, start, out),
            Place::Transposed { name, order } => self.read_transposed((i, name), *order, start, out),
            Place::Mxfp4 { blocks, scales, order } => {
                Mxfp4Bytes { blocks, scales }.read(inner, *order, start, out)
            }
        }
    }

    fn origin(&self, name: &str, element: u64) -> (PathBuf, String) {
        let found = place_of(&self.tensors, name).and_then(|i| match &self.places[i] {
            Place::Pieces { names, elements } => {
                let piece = element.checked_div(*elements)?;
                Some((names.get(piece as usize)?, element % elements))
            }
            Place::Sorted { name, order } => {
                let (expert, row, col) = order.place(element)?;
                Some((name, (expert * order.rows + order.source_row(row)) * order.cols + col))
            }
            Place::Transposed { name, order } => {
                let (expert, row, col) = order.place(element)?;
                Some((name, (expert * order.cols + col) * order.rows + order.source_row(row)))
            }
            Place::Mxfp4 { blocks, order, .. } => {
                let (expert, row, col) = order.place(element)?;
                Some((blocks, ((expert * order.rows + order.source_row(row)) * order.cols + col) / 2))
            }
        });
        match found {
            Some((source, element)) => self.inner.origin(source, element),
            None => self.inner.origin(name, element),
        }
    }

    fn side_file(&self, name: &str) -> Result<Option<SideFile>> {
        self.inner.side_file(name)
    }
}

#[cfg(test)]
mod tests;
