//! Weight storage v2: the `weight.bin` of a package.
//!
//! ```text
//! 0..64    u32 number of blobs, u32 version = 2, zeros
//! then for each blob, from the next multiple of 64:
//!          u32 0xDEADBEEF, u32 data type, u64 size in bytes, u64 offset of the data, u64 unused bits in the last byte, zeros
//!          the data, directly behind
//! ```
//! Little endian throughout. The offset of its metadata identifies a blob. What is written as zeros is not read, and neither
//! are the unused bits of types of whole bytes: writers before coremltools 8 left these fields to chance.

use crate::mil::DataType;
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const VERSION: u32 = 2;
const SENTINEL: u32 = 0xDEAD_BEEF;
/// Bytes of the header, bytes of a blob's metadata, and alignment of metadata.
const METADATA_BYTES: u64 = 64;
/// Bytes of one write: two of the 2 MB pages in which Linux caches a file that is written at this size.
const BUFFER: usize = 4 << 20;

/// Data types with their numbers in weight storage; `MIL.proto` has other numbers.
const BLOB_TYPES: [(DataType, u32); 17] = [
    (DataType::Float16, 1),
    (DataType::Float32, 2),
    (DataType::UInt8, 3),
    (DataType::Int8, 4),
    (DataType::BFloat16, 5),
    (DataType::Int16, 6),
    (DataType::UInt16, 7),
    (DataType::Int4, 8),
    (DataType::UInt1, 9),
    (DataType::UInt2, 10),
    (DataType::UInt4, 11),
    (DataType::UInt3, 12),
    (DataType::UInt6, 13),
    (DataType::Int32, 14),
    (DataType::UInt32, 15),
    (DataType::Float8E4M3FN, 16),
    (DataType::Float8E5M2, 17),
];

/// Writes blobs one after the other; each blob may come in several pieces.
pub struct BlobWriter {
    path: PathBuf,
    /// The file's name in errors.
    shown: PathBuf,
    /// The weight file. The first blob creates it: a package without blobs has no weight file.
    file: Option<File>,
    /// Bytes that are not written yet; fewer than [`BUFFER`].
    pending: Vec<u8>,
    position: u64,
    count: u32,
    open: Option<OpenBlob>,
}

struct OpenBlob {
    metadata: u64,
    remaining: u64,
}

impl BlobWriter {
    /// Makes a writer for the file `path`. The first blob creates the file.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        BlobWriter::named(path.clone(), path)
    }

    /// Makes a writer like [`BlobWriter::new`] for a file that will be moved to `shown`: errors name `shown`.
    pub(crate) fn named(path: PathBuf, shown: PathBuf) -> Self {
        BlobWriter { path, shown, file: None, pending: Vec::new(), position: 0, count: 0, open: None }
    }

    /// Returns the number of blobs begun so far.
    pub fn count(&self) -> u32 {
        self.count
    }

    fn put(&mut self, mut bytes: &[u8]) -> Result<()> {
        let file = match &mut self.file {
            Some(file) => file,
            None => {
                let file = File::create_new(&self.path).map_err(|e| Error::io(&self.shown, e))?;
                self.pending.reserve_exact(BUFFER);
                self.file.insert(file)
            }
        };
        self.position += bytes.len() as u64;
        // Writes start at multiples of BUFFER; `std::io::BufWriter` does not keep to that.
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(BUFFER - self.pending.len()));
            self.pending.extend_from_slice(now);
            bytes = later;
            if self.pending.len() == BUFFER {
                file.write_all(&self.pending).map_err(|e| Error::io(&self.shown, e))?;
                self.pending.clear();
            }
        }
        Ok(())
    }

    /// Starts a blob of `count` elements. Returns the offset of its metadata, which identifies it.
    ///
    /// # Errors
    /// The type cannot be stored, the last blob was not ended, or writing fails.
    pub fn begin(&mut self, dtype: DataType, count: u64) -> Result<u64> {
        if self.open.is_some() {
            return Err(Error::invalid(&self.shown, "use: a blob is begun before the last one is ended"));
        }
        let code = BLOB_TYPES.iter().find(|(t, _)| *t == dtype).map(|(_, c)| *c);
        let code = code.ok_or_else(|| Error::unsupported_here(format!("{dtype} in weight storage")))?;
        let size = dtype.packed_bytes(count);
        let size =
            size.ok_or_else(|| Error::invalid(&self.shown, format!("use: a blob of {count} elements")))?;
        if self.position == 0 {
            self.put(&[0; METADATA_BYTES as usize])?;
        }
        let metadata = metadata_offset(self.position);
        let fill = metadata - self.position;
        self.put(&[0; METADATA_BYTES as usize][..fill as usize])?;
        let unused_bits = size * 8 - count * dtype.bits() as u64;
        let mut head = Vec::with_capacity(METADATA_BYTES as usize);
        head.extend(SENTINEL.to_le_bytes());
        head.extend(code.to_le_bytes());
        head.extend(size.to_le_bytes());
        head.extend((metadata + METADATA_BYTES).to_le_bytes());
        head.extend(unused_bits.to_le_bytes());
        head.resize(METADATA_BYTES as usize, 0);
        self.put(&head)?;
        self.count += 1;
        self.open = Some(OpenBlob { metadata, remaining: size });
        Ok(metadata)
    }

    /// Appends packed elements to the blob that is open.
    ///
    /// # Errors
    /// No blob is open, the bytes exceed the size that it was begun with, or writing fails.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let path = &self.path;
        let wrong = || Error::invalid(path, "use: more bytes than the blob was begun with");
        let open = self.open.as_mut().ok_or_else(wrong)?;
        open.remaining = open.remaining.checked_sub(bytes.len() as u64).ok_or_else(wrong)?;
        self.put(bytes)
    }

    /// Ends the blob that is open. Returns the offset of its metadata.
    ///
    /// # Errors
    /// No blob is open, or it has fewer bytes than it was begun with.
    pub fn end(&mut self) -> Result<u64> {
        match self.open.take() {
            Some(OpenBlob { metadata, remaining: 0 }) => Ok(metadata),
            _ => Err(Error::invalid(&self.shown, "use: fewer bytes than the blob was begun with")),
        }
    }

    /// Writes a whole blob. Returns the offset of its metadata.
    ///
    /// # Errors
    /// Fails like [`BlobWriter::begin`] or [`BlobWriter::write`].
    pub fn append(&mut self, dtype: DataType, count: u64, bytes: &[u8]) -> Result<u64> {
        self.begin(dtype, count)?;
        self.write(bytes)?;
        self.end()
    }

    /// Completes the header and flushes the file to disk. Returns the file's length in bytes; `None` without blobs,
    /// where no file exists.
    ///
    /// # Errors
    /// A blob was not ended, or writing fails.
    pub fn finish(mut self) -> Result<Option<u64>> {
        if self.open.is_some() {
            return Err(Error::invalid(&self.shown, "use: the last blob was not ended"));
        }
        let Some(mut file) = self.file.take() else { return Ok(None) };
        let mut header = self.count.to_le_bytes().to_vec();
        header.extend(VERSION.to_le_bytes());
        let done = file
            .write_all(&self.pending)
            .and_then(|()| file.seek(SeekFrom::Start(0)))
            .and_then(|_| file.write_all(&header))
            .and_then(|()| file.sync_all());
        done.map_err(|e| Error::io(&self.shown, e))?;
        Ok(Some(self.position))
    }
}

/// Computes the offset of the next blob's metadata in a file of `position` bytes.
fn metadata_offset(position: u64) -> u64 {
    position.max(METADATA_BYTES).next_multiple_of(METADATA_BYTES)
}

/// Computes the offsets that a [`BlobWriter`] gives its blobs, without their data.
#[derive(Debug, Default)]
pub struct BlobOffsets {
    /// Length of the file so far.
    position: u64,
}

impl BlobOffsets {
    /// Returns the offset that the next blob gets, one of `count` elements.
    ///
    /// # Errors
    /// The file would exceed 2^63 - 1 bytes.
    pub fn append(&mut self, dtype: DataType, count: u64) -> Result<u64> {
        let metadata = metadata_offset(self.position);
        let end = dtype.packed_bytes(count).and_then(|size| (metadata + METADATA_BYTES).checked_add(size));
        // Files are shorter than 2^63 bytes.
        let end = end.filter(|&end| end <= i64::MAX as u64);
        self.position =
            end.ok_or_else(|| Error::unsupported_here(format!("a blob of {count} elements of {dtype}")))?;
        Ok(metadata)
    }
}

/// A blob in a mapped file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blob<'a> {
    /// Element type.
    pub dtype: DataType,
    /// Number of elements.
    pub count: u64,
    /// Packed elements.
    pub data: &'a [u8],
}

#[derive(Clone, Copy)]
struct BlobEntry {
    dtype: DataType,
    count: u64,
    start: usize,
    end: usize,
}

/// A blob's bytes; keeps the weight file mapped.
#[derive(Clone)]
pub struct SharedBlob {
    file: Arc<BlobFile>,
    start: usize,
    end: usize,
}

impl SharedBlob {
    /// Returns the blob's packed elements.
    pub fn data(&self) -> &[u8] {
        &self.file.map[self.start..self.end]
    }
}

/// A weight file, mapped and checked once.
pub struct BlobFile {
    path: PathBuf,
    map: memmap2::Mmap,
    blobs: BTreeMap<u64, BlobEntry>,
}

impl BlobFile {
    /// Maps a weight file read-only and checks it.
    ///
    /// # Errors
    /// The file cannot be mapped, or its header, a blob's metadata or the chain of blobs is wrong.
    pub fn open(path: &Path) -> Result<BlobFile> {
        BlobFile::map(path, false)
    }

    /// Opens a weight file like [`BlobFile::open`], for repeated reads of the whole file. On Linux it asks for pages of
    /// 2 MB, which also makes the system read in large pieces. Pages that are in memory keep their size.
    ///
    /// # Errors
    /// Fails like [`BlobFile::open`].
    pub fn open_to_run(path: &Path) -> Result<BlobFile> {
        BlobFile::map(path, true)
    }

    fn map(path: &Path, to_run: bool) -> Result<BlobFile> {
        let file = anemoe_io::open_input(path, u64::MAX).map_err(|e| Error::io(path, e))?;
        // SAFETY: the map is only read. A file that another process shortens meanwhile ends this process with a signal,
        // as in every program that maps its weights.
        #[allow(unsafe_code)]
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(|e| Error::io(path, e))?;
        #[cfg(target_os = "linux")]
        if to_run {
            // Advice comes before the first read: pages that are in memory keep their size. A refusal does no harm.
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        #[cfg(not(target_os = "linux"))]
        let _ = to_run;
        let blobs = index(&map).map_err(|what| Error::invalid(path, format!("weight file: {what}")))?;
        let file = BlobFile { path: path.to_path_buf(), map, blobs };
        // The check reads a few bytes behind each blob, and the system maps the pages around them: gigabytes for a
        // bundle of many packages. They are released.
        file.release();
        Ok(file)
    }

    /// Returns the blob whose metadata lies at `offset`.
    ///
    /// # Errors
    /// No blob's metadata lies at `offset`.
    pub fn blob(&self, offset: u64) -> Result<Blob<'_>> {
        let entry = self.blobs.get(&offset).ok_or_else(|| {
            Error::invalid(
                &self.path,
                format!("weight file: no blob at offset {offset} (of {})", self.blobs.len()),
            )
        })?;
        Ok(Blob { dtype: entry.dtype, count: entry.count, data: &self.map[entry.start..entry.end] })
    }

    /// Releases the resident pages; a later read brings them back from the file. Bounds resident memory where many
    /// large files are read once.
    pub fn release(&self) {
        #[cfg(unix)]
        {
            // SAFETY: a map of a file that nobody writes through holds nothing that the file does not.
            #[allow(unsafe_code)]
            // A refusal leaves the pages resident, which does no harm.
            let _ = unsafe { self.map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
        }
    }

    /// Returns a blob like [`BlobFile::blob`] that keeps the file mapped.
    ///
    /// # Errors
    /// Fails like [`BlobFile::blob`].
    pub fn shared(self: &Arc<BlobFile>, offset: u64) -> Result<SharedBlob> {
        self.blob(offset)?;
        let BlobEntry { start, end, .. } = self.blobs[&offset];
        Ok(SharedBlob { file: self.clone(), start, end })
    }

    /// Maps all pages of the file ahead of use (`MADV_POPULATE_READ`, Linux only), so that reads do not fault at each
    /// page. Ignores failures: later reads map the pages one by one.
    pub fn populate(&self) {
        #[cfg(target_os = "linux")]
        let _ = self.map.advise(memmap2::Advice::PopulateRead);
    }

    /// Returns the metadata offsets of all blobs, ascending.
    pub fn offsets(&self) -> impl Iterator<Item = u64> + '_ {
        self.blobs.keys().copied()
    }

    /// Returns the file's length in bytes.
    pub fn len(&self) -> u64 {
        self.map.len() as u64
    }

    /// Tells whether the file has no bytes.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }
}

fn index(bytes: &[u8]) -> std::result::Result<BTreeMap<u64, BlobEntry>, String> {
    let len = bytes.len() as u64;
    let u32_at = |at: u64| {
        let at = at as usize;
        u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
    };
    let u64_at = |at: u64| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
    if len < METADATA_BYTES {
        return Err(format!("{len} bytes, the header alone takes {METADATA_BYTES}"));
    }
    if u32_at(4) != VERSION {
        return Err(format!("version {} where {VERSION} is read", u32_at(4)));
    }
    let count = u64::from(u32_at(0));
    // The count sizes no allocation: the walk stops at the end of the file.
    if count > len / METADATA_BYTES {
        return Err(format!("{count} blobs in {len} bytes"));
    }
    let mut blobs = BTreeMap::new();
    let mut at = METADATA_BYTES;
    for i in 0..count {
        if at.checked_add(METADATA_BYTES).is_none_or(|end| end > len) {
            return Err(format!(
                "blob {i} of {count}: its metadata at {at} is outside the file of {len} bytes"
            ));
        }
        let place = format!("blob {i} at {at}");
        if u32_at(at) != SENTINEL {
            return Err(format!("{place}: sentinel {:#x} where {SENTINEL:#x} is expected", u32_at(at)));
        }
        let code = u32_at(at + 4);
        let dtype = BLOB_TYPES.iter().find(|(_, c)| *c == code).map(|(t, _)| *t);
        let dtype = dtype.ok_or_else(|| format!("{place}: unknown data type {code}"))?;
        let bits = dtype.bits() as u64;
        let unused_bits = if bits < 8 { u64_at(at + 24) } else { 0 };
        let (size, start) = (u64_at(at + 8), u64_at(at + 16));
        if start != at + METADATA_BYTES {
            return Err(format!(
                "{place}: its data is said to be at {start}, expected directly behind at {}",
                at + METADATA_BYTES
            ));
        }
        let end = start.checked_add(size).filter(|&end| end <= len);
        let end = end.ok_or_else(|| {
            format!("{place}: {size} bytes from {start} are outside the file of {len} bytes")
        })?;
        let used = size.checked_mul(8).and_then(|b| b.checked_sub(unused_bits));
        let used = used.filter(|used| unused_bits < 8 && used % bits == 0);
        let used =
            used.ok_or_else(|| format!("{place}: {unused_bits} unused bits in {size} bytes of {dtype}"))?;
        blobs.insert(at, BlobEntry { dtype, count: used / bits, start: start as usize, end: end as usize });
        at = end.checked_next_multiple_of(METADATA_BYTES).ok_or_else(|| format!("{place}: overflow"))?;
    }
    Ok(blobs)
}

/// Packs the low `bits` bits of each element without padding, least significant bit first. At most eight bits.
pub fn pack_sub_byte(elements: &[u8], bits: usize) -> Vec<u8> {
    let mask = (1u64 << bits) - 1;
    let mut out = Vec::with_capacity((elements.len() * bits).div_ceil(8));
    // Eight elements fill whole bytes.
    for group in elements.chunks(8) {
        let word = group.iter().rev().fold(0u64, |word, &e| word << bits | u64::from(e) & mask);
        out.extend_from_slice(&word.to_le_bytes()[..(group.len() * bits).div_ceil(8)]);
    }
    out
}

/// Unpacks `count` elements of `bits` bits, least significant bit first (see [`pack_sub_byte`]). Returns fewer when
/// `packed` is too short.
pub fn unpack_sub_byte(packed: &[u8], bits: usize, count: usize) -> Vec<u8> {
    let count = count.min(packed.len() * 8 / bits);
    let mask = (1u64 << bits) - 1;
    let mut out = Vec::with_capacity(count.next_multiple_of(8));
    for group in packed[..(count * bits).div_ceil(8)].chunks(bits) {
        let mut bytes = [0; 8];
        bytes[..group.len()].copy_from_slice(group);
        let word = u64::from_le_bytes(bytes);
        out.extend((0..8).map(|i| (word >> (i * bits) & mask) as u8));
    }
    out.truncate(count);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn packing_is_least_significant_bit_first() {
        assert_eq!(pack_sub_byte(&[1, 2, 3, 4, 5], 4), [0x21, 0x43, 0x05]);
        assert_eq!(pack_sub_byte(&[1, 0xfe, 3], 4), [0xe1, 0x03]);
        assert_eq!(pack_sub_byte(&[1, 0, 1, 1, 0, 0, 0, 1, 1], 1), [0b1000_1101, 1]);
        // 3 bits: 1, 2, 7 take bits 0-2, 3-5 and 6-8.
        assert_eq!(pack_sub_byte(&[1, 2, 7], 3), [0b1101_0001, 0b1]);
    }

    proptest! {
        #[test]
        fn packing_round_trips(elements in prop::collection::vec(any::<u8>(), 0..200), bits in prop::sample::select(vec![1usize, 2, 3, 4, 6, 8])) {
            let masked: Vec<u8> = elements.iter().map(|e| e & ((1u16 << bits) - 1) as u8).collect();
            let packed = pack_sub_byte(&elements, bits);
            prop_assert_eq!(packed.len(), (elements.len() * bits).div_ceil(8));
            prop_assert_eq!(unpack_sub_byte(&packed, bits, masked.len()), masked);
        }

        #[test]
        fn blobs_round_trip(sizes in prop::collection::vec((0usize..300, prop::sample::select(vec![DataType::Float16, DataType::UInt3, DataType::Int4, DataType::UInt8])), 1..8)) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("weight.bin");
            let mut writer = BlobWriter::new(&path);
            let mut written = Vec::new();
            let mut planned = BlobOffsets::default();
            for (i, (count, dtype)) in sizes.iter().enumerate() {
                let bytes: Vec<u8> = (0..dtype.packed_bytes(*count as u64).unwrap()).map(|k| (k as u8).wrapping_mul(31) ^ i as u8).collect();
                let offset = writer.append(*dtype, *count as u64, &bytes).unwrap();
                prop_assert_eq!(planned.append(*dtype, *count as u64).unwrap(), offset);
                written.push((offset, *dtype, *count as u64, bytes));
            }
            let len = writer.finish().unwrap().unwrap();
            let file = BlobFile::open(&path).unwrap();
            prop_assert_eq!(file.len(), len);
            prop_assert_eq!(file.offsets().count(), sizes.len());
            for (offset, dtype, count, bytes) in &written {
                let blob = file.blob(*offset).unwrap();
                prop_assert_eq!((blob.dtype, blob.count, blob.data), (*dtype, *count, bytes.as_slice()));
            }
        }

        /// Checks that opening and reading a damaged file never panics.
        #[test]
        fn damage_is_survived(at in 0usize..320, value in any::<u8>(), cut in 0usize..400) {
            let (dir, path) = sample();
            let mut bytes = std::fs::read(&path).unwrap();
            let n = bytes.len();
            bytes[at % n] = value;
            bytes.truncate(cut.max(1));
            std::fs::write(&path, bytes).unwrap();
            if let Ok(file) = BlobFile::open(&path) {
                for offset in file.offsets().collect::<Vec<_>>() {
                    prop_assert!(file.blob(offset).is_ok());
                }
            }
            drop(dir);
        }
    }

    /// Writes two blobs: 40 bytes of fp16 at 64, 5 elements of uint3 at 192.
    fn sample() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weight.bin");
        let mut writer = BlobWriter::new(&path);
        assert_eq!(writer.append(DataType::Float16, 20, &[7; 40]).unwrap(), 64);
        assert_eq!(writer.append(DataType::UInt3, 5, &[1, 2]).unwrap(), 192);
        assert_eq!(writer.finish().unwrap(), Some(258));
        (dir, path)
    }

    /// Damages the sample and returns the message of the error that opening it gives.
    fn refused(damage: impl FnOnce(&mut Vec<u8>)) -> String {
        let (_dir, path) = sample();
        let mut bytes = std::fs::read(&path).unwrap();
        damage(&mut bytes);
        std::fs::write(&path, bytes).unwrap();
        let message = BlobFile::open(&path).err().expect("a damaged file is refused").to_string();
        assert!(message.contains("weight.bin"), "{message}");
        message
    }

    fn put(bytes: &mut [u8], at: usize, value: u64) {
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }

    #[test]
    fn truncated_header() {
        assert!(refused(|b| b.truncate(63)).contains("header"));
    }

    #[test]
    fn truncated_metadata() {
        assert!(refused(|b| b.truncate(200)).contains("metadata"));
    }

    #[test]
    fn truncated_data() {
        assert!(refused(|b| b.truncate(257)).contains("outside the file"));
    }

    #[test]
    fn count_that_lies() {
        assert!(refused(|b| b[..4].copy_from_slice(&u32::MAX.to_le_bytes())).contains("4294967295 blobs"));
        assert!(refused(|b| b[0] = 3).contains("blob 2 of 3"));
    }

    #[test]
    fn offset_that_lies() {
        assert!(refused(|b| put(b, 64 + 16, u64::MAX)).contains("directly behind"));
    }

    #[test]
    fn overlapping_blobs() {
        // The second blob claims the data of the first.
        assert!(refused(|b| put(b, 192 + 16, 128)).contains("directly behind"));
        // The first is so long that the second would start inside it.
        assert!(
            refused(|b| put(b, 64 + 8, 80)).contains("sentinel")
                || refused(|b| put(b, 64 + 8, 80)).contains("metadata")
        );
    }

    #[test]
    fn size_that_lies() {
        assert!(refused(|b| put(b, 64 + 8, u64::MAX - 3)).contains("outside the file"));
    }

    #[test]
    fn wrong_sentinel_version_type_and_padding() {
        assert!(refused(|b| b[64] = 0).contains("sentinel"));
        assert!(refused(|b| b[4] = 1).contains("version 1"));
        assert!(refused(|b| b[68] = 99).contains("data type 99"));
        assert!(refused(|b| put(b, 192 + 24, 2)).contains("unused bits"));
        assert!(refused(|b| put(b, 192 + 24, 9)).contains("unused bits"));
    }

    #[test]
    fn unused_fields_may_hold_anything() {
        let (_dir, path) = sample();
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[8..64].fill(0xab);
        bytes[64 + 24..128].fill(0xcd);
        bytes[192 + 32..256].fill(0xef);
        std::fs::write(&path, bytes).unwrap();
        let file = BlobFile::open(&path).unwrap();
        let blob = file.blob(64).unwrap();
        assert_eq!((blob.dtype, blob.count, blob.data), (DataType::Float16, 20, &[7; 40][..]));
        assert_eq!(file.blob(192).unwrap().count, 5);
    }

    #[test]
    fn an_offset_between_blobs_is_refused() {
        let (_dir, path) = sample();
        let file = BlobFile::open(&path).unwrap();
        assert!(file.blob(128).unwrap_err().to_string().contains("no blob at offset 128"));
    }

    #[test]
    fn the_writer_counts_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = BlobWriter::new(dir.path().join("w"));
        writer.begin(DataType::Float16, 2).unwrap();
        assert!(writer.begin(DataType::Float16, 2).is_err());
        writer.write(&[1, 2, 3]).unwrap();
        assert!(writer.write(&[1, 2]).is_err());
        let mut writer = BlobWriter::new(dir.path().join("x"));
        writer.begin(DataType::Float16, 2).unwrap();
        assert!(writer.end().is_err());
        assert!(BlobWriter::new(dir.path().join("none")).finish().unwrap().is_none());
        assert!(!dir.path().join("none").exists());
    }

    #[test]
    fn a_disk_that_is_full_is_an_error() {
        // /dev/full refuses every write. Systems without it skip the test.
        if Path::new("/dev/full").exists() {
            let file = File::options().write(true).open("/dev/full").unwrap();
            let mut writer = BlobWriter::new("/dev/full");
            writer.file = Some(file);
            // A write beyond the buffer fails at once; a shorter write fails at the end.
            let bytes = vec![0; BUFFER];
            let err = writer.append(DataType::UInt8, bytes.len() as u64, &bytes).unwrap_err();
            assert!(err.to_string().contains("/dev/full"), "{err}");
            let mut writer = BlobWriter::new("/dev/full");
            writer.file = Some(File::options().write(true).open("/dev/full").unwrap());
            writer.append(DataType::UInt8, 1000, &[0; 1000]).unwrap();
            let err = writer.finish().unwrap_err();
            assert!(err.to_string().contains("/dev/full"), "{err}");
        }
    }
}
