//! `.npz` archives: a zip file with one `.npy` file per array.

use crate::npy::{PIECE, ReadError, check, read_array, write_array, write_atomic};
use crate::npy_header::RefusedArray;
use crate::{Array, Error, Result};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::Path;
use zip::result::ZipError;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

/// Bytes that the arrays of any archive may take, or [`MAX_EXPANSION`] times the archive's length where that is more.
const MIN_LIMIT: u64 = 64 << 20;
/// Bytes of arrays per byte of a large archive. Computed values hardly compress: a hundredfold is far beyond them.
const MAX_EXPANSION: u64 = 100;

/// Signature of the end of central directory record (APPNOTE 4.3.16).
const END: &[u8] = b"PK\x05\x06";
/// Bytes of the end of central directory record without its comment.
const END_BYTES: u64 = 22;
/// Longest comment behind the record, in bytes: its length is a u16.
const MAX_COMMENT_BYTES: u64 = u16::MAX as u64;
/// Most bytes that are read to find the arrays. The central directory of a million arrays takes 64 MB. Without this
/// bound, the zip reader would search the whole file for the end record, however long the file is.
const MAX_LIST_BYTES: u64 = 64 << 20;

/// Reads every array of a `.npz` file into a map from names (without `.npy`) to arrays.
///
/// # Errors
/// The file cannot be read, is no zip file, holds an entry that is no array, or a name twice. The arrays expand to
/// more than 64 MiB and more than 100 times the file's length. An array is damaged, or its element type is not implemented.
pub fn read_npz(path: &Path) -> Result<BTreeMap<String, Array>> {
    read_npz_within(path, 0)
}

/// Reads a `.npz` file like [`read_npz`], but lets the arrays take at least `wanted` bytes, however short the file is.
///
/// # Errors
/// Fails like [`read_npz`]; the archive may also expand to `wanted` bytes.
pub fn read_npz_within(path: &Path, wanted: u64) -> Result<BTreeMap<String, Array>> {
    read_limited(path, wanted.max(MIN_LIMIT))
}

fn read_limited(path: &Path, min_limit: u64) -> Result<BTreeMap<String, Array>> {
    let file = anemoe_io::open_input(path, u64::MAX).map_err(|e| Error::io(path, e))?;
    let length = file.metadata().map_err(|e| Error::io(path, e))?.len();
    let limit = length.saturating_mul(MAX_EXPANSION).max(min_limit);
    if !has_end(&file, length).map_err(|e| Error::io(path, e))? {
        return Err(no_archive().at(path, ""));
    }
    let left = Cell::new(MAX_LIST_BYTES);
    let reader = BufReader::new(Budget { file: &file, left: &left });
    let mut archive = ZipArchive::new(reader).map_err(|e| match left.get() {
        0 => no_archive().at(path, ""),
        _ => zip_error(e).at(path, ""),
    })?;
    left.set(u64::MAX);
    // The zip reader silently keeps one entry of each name.
    let listed =
        directory_entries(&file, archive.central_directory_start()).map_err(|e| Error::io(path, e))?;
    if listed != archive.len() {
        let what =
            format!("zip archive: {listed} entries with {} names; an array is there twice", archive.len());
        return Err(invalid(what).at(path, ""));
    }
    let mut arrays = BTreeMap::new();
    let mut total = 0u64;
    for i in 0..archive.len() {
        let mut entry = archive.by_index(i).map_err(|e| zip_error(e).at(path, &format!("entry {i}: ")))?;
        let file_name = entry.name().to_string();
        let subject = format!("array `{}`: ", file_name.escape_debug());
        let name = file_name.strip_suffix(".npy").unwrap_or(&file_name).to_string();
        let bytes = entry.size();
        if entry.compression() == CompressionMethod::Stored && bytes != entry.compressed_size() {
            let stored = entry.compressed_size();
            return Err(invalid(format!("size: stored in {stored} bytes, but {bytes} are claimed"))
                .at(path, &subject));
        }
        // The sum also bounds several entries over the same bytes of the archive.
        total = total.saturating_add(bytes);
        if total > limit {
            let what =
                format!("size: with it the archive of {length} bytes expands to {total}, more than {limit}");
            return Err(invalid(what).at(path, &subject));
        }
        let array = read_array(&mut entry, bytes).map_err(|e| e.at(path, &subject))?;
        if arrays.insert(name, array).is_some() {
            return Err(invalid("name: it is there twice").at(path, &subject));
        }
    }
    Ok(arrays)
}

/// Tells whether the last `END_BYTES + MAX_COMMENT_BYTES` bytes of the file hold the signature of an archive's end.
/// Rewinds the file.
fn has_end(mut file: &File, length: u64) -> io::Result<bool> {
    file.seek(SeekFrom::Start(length.saturating_sub(END_BYTES + MAX_COMMENT_BYTES)))?;
    let mut tail = Vec::new();
    file.take(END_BYTES + MAX_COMMENT_BYTES).read_to_end(&mut tail)?;
    file.rewind()?;
    Ok(tail.windows(END.len()).any(|w| w == END))
}

/// A file that refuses to be read once `left` bytes have been read.
struct Budget<'a> {
    file: &'a File,
    left: &'a Cell<u64>,
}

impl Read for Budget<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let left = self.left.get();
        if left == 0 && !out.is_empty() {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let room = usize::try_from(left).unwrap_or(usize::MAX).min(out.len());
        let n = self.file.read(&mut out[..room])?;
        self.left.set(left - n as u64);
        Ok(n)
    }
}

impl Seek for Budget<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

/// Writes a `.npz` file without compression, like `numpy.savez`: beside `path` first, then renamed into place. The
/// same arrays in the same order give the same bytes.
///
/// # Errors
/// A name is empty, longer than 1024 bytes, ends with `.npy`, holds a slash, backslash or NUL, or is there twice. A
/// shape's product is not the number of elements. A file operation fails. No half-written file is left.
pub fn write_npz(path: &Path, entries: &[(String, Array)]) -> Result<()> {
    write(path, entries, CompressionMethod::Stored)
}

/// Writes a `.npz` file like [`write_npz`], with deflate compression, like `numpy.savez_compressed`.
///
/// # Errors
/// Fails like [`write_npz`].
pub fn write_npz_compressed(path: &Path, entries: &[(String, Array)]) -> Result<()> {
    write(path, entries, CompressionMethod::Deflated)
}

fn write(path: &Path, entries: &[(String, Array)], method: CompressionMethod) -> Result<()> {
    let mut names = BTreeSet::new();
    for (name, array) in entries {
        let wrong = |what| Error::invalid(path, format!("array `{name}`: {what}"));
        if name.is_empty() || name.len() > 1024 || name.ends_with(".npy") || name.contains(['\0', '/', '\\'])
        {
            return Err(wrong("name: expected 1 to 1024 bytes without slashes and without `.npy`".into()));
        }
        if !names.insert(name) {
            return Err(wrong("name: it is there twice".into()));
        }
        check(array).map_err(wrong)?;
    }
    let failure = RefCell::new(None);
    let written = write_atomic(path, |file| {
        let sink = CheckedSink { file, failure: &failure };
        let mut zip = ZipWriter::new(BufWriter::with_capacity(PIECE, sink));
        let filled = fill(&mut zip, entries, method);
        if let Err(e) = filled {
            // A dropped writer would try to finish the archive, and print that it failed.
            std::mem::forget(zip);
            return Err(e);
        }
        zip.finish()?.flush()
    });
    match failure.take() {
        Some(source) => Err(Error::io(path, source)),
        None => written,
    }
}

/// Writes all entries of an archive.
fn fill<W: Write + io::Seek>(
    zip: &mut ZipWriter<W>,
    entries: &[(String, Array)],
    method: CompressionMethod,
) -> io::Result<()> {
    for (name, array) in entries {
        // Entries that may pass 4 GiB need Zip64 sizes, which the header declares before the data.
        let bytes = array.data.len() as u64 * array.data.dtype().bytes() as u64;
        let options = SimpleFileOptions::default()
            .compression_method(method)
            .last_modified_time(zip::DateTime::default())
            .unix_permissions(0o644)
            .large_file(bytes > u64::from(u32::MAX / 2));
        zip.start_file(format!("{name}.npy"), options)?;
        write_array(zip, array)?;
    }
    Ok(())
}

/// A file that keeps its first error (which the zip library wraps) and ignores all later operations. The zip library
/// would otherwise write again when it is dropped, and print that it failed.
struct CheckedSink<'a> {
    file: &'a mut File,
    failure: &'a RefCell<Option<io::Error>>,
}

impl CheckedSink<'_> {
    /// Runs a file operation and keeps its error. Returns `done` without running it where an earlier operation has failed.
    fn attempt<T>(&mut self, done: T, call: impl FnOnce(&mut File) -> io::Result<T>) -> io::Result<T> {
        if self.failure.borrow().is_some() {
            return Ok(done);
        }
        call(self.file).map_err(|e| {
            let kind = e.kind();
            self.failure.replace(Some(e));
            kind.into()
        })
    }
}

impl Write for CheckedSink<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.attempt(bytes.len(), |file| file.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.attempt((), Write::flush)
    }
}

impl Seek for CheckedSink<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.attempt(0, |file| file.seek(to))
    }
}

/// Counts the consecutive entries of the central directory that starts at `start` (APPNOTE 4.3.12).
fn directory_entries(file: &File, start: u64) -> io::Result<usize> {
    let mut from = BufReader::new(file);
    from.seek(SeekFrom::Start(start))?;
    let mut entries = 0;
    let mut fixed = [0u8; 46];
    while let Ok(()) = from.read_exact(&mut fixed) {
        if !fixed.starts_with(b"PK\x01\x02") {
            break;
        }
        // Lengths of the name, the extra field and the comment, which follow the fixed part.
        let variable: i64 =
            [28, 30, 32].iter().map(|&i| i64::from(u16::from_le_bytes([fixed[i], fixed[i + 1]]))).sum();
        from.seek_relative(variable)?;
        entries += 1;
    }
    Ok(entries)
}

fn invalid(what: impl Into<String>) -> ReadError {
    ReadError::RefusedArray(RefusedArray::Invalid(what.into()))
}

fn no_archive() -> ReadError {
    invalid("file: it is not a zip archive, as .npz files are, or its end is missing")
}

fn zip_error(e: ZipError) -> ReadError {
    match e {
        ZipError::Io(e) => io::Error::into(e),
        ZipError::UnsupportedArchive(what) => {
            ReadError::RefusedArray(RefusedArray::Unsupported(format!("zip archive: {what}")))
        }
        // The reader's own text uses an abbreviation of the zip format (EOCD: end of central directory).
        ZipError::InvalidArchive(what) if what.contains("EOCD") => no_archive(),
        e => invalid(format!("zip archive: {e}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ArrayData, DType};
    use anemoe_io::Kind;
    use proptest::collection::vec;
    use proptest::prelude::*;

    struct Place(tempfile::TempDir);

    impl Place {
        fn new() -> Self {
            Place(tempfile::tempdir().unwrap())
        }

        fn file(&self) -> std::path::PathBuf {
            self.0.path().join("a.npz")
        }

        /// Returns the bytes of a zip archive with `files` (name and contents).
        fn archive(&self, files: &[(&str, &[u8])], method: CompressionMethod) -> Vec<u8> {
            let mut zip = ZipWriter::new(std::io::Cursor::new(Vec::new()));
            for (name, bytes) in files {
                zip.start_file(*name, SimpleFileOptions::default().compression_method(method)).unwrap();
                zip.write_all(bytes).unwrap();
            }
            zip.finish().unwrap().into_inner()
        }

        fn read(&self, bytes: &[u8]) -> Result<BTreeMap<String, Array>> {
            std::fs::write(self.file(), bytes).unwrap();
            read_npz(&self.file())
        }

        /// Returns the error text of reading `bytes`, and checks that the error is of kind `Invalid` and names the file.
        fn invalid(&self, bytes: &[u8]) -> String {
            let e = self.read(bytes).unwrap_err();
            assert!(e.kind() == Kind::Invalid && e.path() == Some(self.file().as_path()), "{e}");
            e.what().into()
        }
    }

    fn npy(array: &Array) -> Vec<u8> {
        let mut out = Vec::new();
        write_array(&mut out, array).unwrap();
        out
    }

    fn ones(n: usize) -> Array {
        Array::new(vec![n], vec![1f32; n]).unwrap()
    }

    /// Overwrites a field of the first local and the first central header; `local` is the field's offset in the file,
    /// `central` its offset in the central header.
    fn patch(bytes: &mut [u8], local: usize, central: usize, value: &[u8]) {
        let at = bytes.windows(4).position(|w| w == b"PK\x01\x02").unwrap();
        bytes[local..local + value.len()].copy_from_slice(value);
        bytes[at + central..at + central + value.len()].copy_from_slice(value);
    }

    #[test]
    fn equal_arrays_give_equal_bytes() {
        let place = Place::new();
        let entries = [("b".to_string(), ones(1000)), ("a".to_string(), ones(3))];
        for write in [write_npz, write_npz_compressed] {
            write(&place.file(), &entries).unwrap();
            let first = std::fs::read(place.file()).unwrap();
            write(&place.file(), &entries).unwrap();
            assert_eq!(std::fs::read(place.file()).unwrap(), first);
            assert_eq!(read_npz(&place.file()).unwrap(), BTreeMap::from(entries.clone()));
        }
        assert!(std::fs::metadata(place.file()).unwrap().len() < 1000);
        assert_eq!(std::fs::read_dir(place.0.path()).unwrap().count(), 1);
    }

    #[test]
    fn names_that_cannot_be_written() {
        let place = Place::new();
        for name in ["", "a/b", "a.npy", "..\\b", "nul\0"] {
            let err = write_npz(&place.file(), &[(name.to_string(), ones(1))]).unwrap_err();
            assert!(err.to_string().contains("name:"), "{err}");
        }
        let twice = [("a".to_string(), ones(1)), ("a".to_string(), ones(2))];
        assert!(write_npz(&place.file(), &twice).unwrap_err().to_string().contains("twice"));
        assert!(!place.file().exists());
    }

    #[test]
    fn a_file_that_is_no_archive() {
        let place = Place::new();
        for bytes in [&b""[..], b"\x93NUMPY\x01\x00", &[0u8; 4096]] {
            assert!(place.invalid(bytes).contains("zip archive"));
        }
    }

    #[test]
    fn an_archive_that_is_cut_off() {
        let place = Place::new();
        let bytes = place.archive(&[("a.npy", &npy(&ones(100)))], CompressionMethod::Deflated);
        for n in 0..bytes.len() {
            place.invalid(&bytes[..n]);
        }
    }

    #[test]
    fn a_long_file_is_not_searched_for_an_end() {
        let place = Place::new();
        let end = |directory: u32| {
            // The record claims one entry, in a directory of 46 bytes at offset `directory`, which holds none.
            let mut end = b"PK\x05\x06\0\0\0\0\x01\0\x01\0\x2e\0\0\0".to_vec();
            end.extend(directory.to_le_bytes());
            end.extend([0, 0]);
            end
        };
        for tail in [vec![], end(0), end(u32::MAX - 1)] {
            let mut file = File::create(place.file()).unwrap();
            file.set_len(40 << 30).unwrap();
            file.seek(SeekFrom::End(0)).unwrap();
            file.write_all(&tail).unwrap();
            let started = std::time::Instant::now();
            let e = read_npz(&place.file()).unwrap_err().to_string();
            assert!(e.contains("not a zip archive"), "{e}");
            assert!(started.elapsed().as_secs() < 5);
        }
        // A comment may follow the end.
        let mut bytes = place.archive(&[("a.npy", &npy(&ones(3)))], CompressionMethod::Stored);
        let at = bytes.len() - 2;
        bytes[at..].copy_from_slice(&u16::MAX.to_le_bytes());
        bytes.resize(bytes.len() + usize::from(u16::MAX), b'x');
        assert_eq!(place.read(&bytes).unwrap()["a"], ones(3));
    }

    #[test]
    fn an_entry_that_is_no_array() {
        let place = Place::new();
        let bytes = place.archive(&[("readme.txt", b"twelve bytes")], CompressionMethod::Stored);
        assert!(place.invalid(&bytes).contains("array `readme.txt`: file: it does not start with the magic"));
    }

    #[test]
    fn a_name_that_is_there_twice() {
        let place = Place::new();
        let array = npy(&ones(4));
        let files = [("a.npy", &array[..]), ("b.npy", &array[..])];
        let mut bytes = place.archive(&files, CompressionMethod::Stored);
        for at in 0..bytes.len() - 5 {
            if &bytes[at..at + 5] == b"b.npy" {
                bytes[at] = b'a';
            }
        }
        assert!(place.invalid(&bytes).contains("2 entries with 1 names"));
        let files = [("a.npy", &array[..]), ("a", &array[..])];
        let bytes = place.archive(&files, CompressionMethod::Stored);
        assert!(place.invalid(&bytes).contains("array `a`: name: it is there twice"));
    }

    #[test]
    fn a_shape_that_claims_more_than_the_entry_has() {
        let place = Place::new();
        let mut array = npy(&ones(4));
        let at = array.windows(4).position(|w| w == b"(4,)").unwrap();
        array[at..at + 14].copy_from_slice(b"(4000000000,)}");
        for method in [CompressionMethod::Stored, CompressionMethod::Deflated] {
            let bytes = place.archive(&[("a.npy", &array)], method);
            assert!(place.invalid(&bytes).contains("16 bytes, but shape [4000000000]"));
        }
    }

    /// Checks that a size of 4 GB is refused which the directory and the array's shape claim; the array has 16 bytes.
    #[test]
    fn a_directory_that_claims_four_gigabytes() {
        let place = Place::new();
        let mut array = npy(&ones(4));
        let at = array.windows(4).position(|w| w == b"(4,)").unwrap();
        array[at..at + 14].copy_from_slice(b"(1073741791,)}");
        let size = (1_073_741_791u32 * 4 + 128).to_le_bytes();
        let mut bytes = place.archive(&[("a.npy", &array)], CompressionMethod::Stored);
        patch(&mut bytes, 22, 24, &size);
        assert!(place.invalid(&bytes).contains("are claimed"));
        let mut bytes = place.archive(&[("a.npy", &array)], CompressionMethod::Deflated);
        patch(&mut bytes, 22, 24, &size);
        assert!(place.invalid(&bytes).contains("expands to 4294967292, more than 67108864"));
    }

    /// Checks that a deflated stream is refused that ends long before the length in both headers, which is below the
    /// archive's limit.
    #[test]
    fn a_stream_that_is_shorter_than_its_claim() {
        let place = Place::new();
        let mut array = npy(&ones(4));
        let at = array.windows(4).position(|w| w == b"(4,)").unwrap();
        array[at..at + 12].copy_from_slice(b"(10000000,)}");
        let mut bytes = place.archive(&[("a.npy", &array)], CompressionMethod::Deflated);
        patch(&mut bytes, 22, 24, &(40_000_128u32).to_le_bytes());
        assert!(place.invalid(&bytes).contains("array `a.npy`: data:"));
    }

    #[test]
    fn a_bomb_of_zeros() {
        let place = Place::new();
        let zeros = Array::new(vec![1 << 20], vec![0u8; 1 << 20]).unwrap();
        write_npz_compressed(&place.file(), &[("zeros".to_string(), zeros)]).unwrap();
        assert!(read_limited(&place.file(), 2 << 20).is_ok());
        let err = read_limited(&place.file(), 1 << 20).unwrap_err().to_string();
        assert!(
            err.contains("array `zeros.npy`: size: with it the archive of ")
                && err.contains(" bytes expands to 1048704, more than 1048576"),
            "{err}"
        );
    }

    /// Checks that 80 MB of zeros in an archive of 80 kB are read only by a caller that wants 80 MB.
    #[test]
    fn a_bomb_that_a_caller_has_use_for() {
        let place = Place::new();
        let n = 80_000_000;
        let zeros = Array::new(vec![n], vec![0u8; n]).unwrap();
        write_npz_compressed(&place.file(), &[("zeros".to_string(), zeros)]).unwrap();
        let length = std::fs::metadata(place.file()).unwrap().len();
        assert!(length < 200_000, "{length}");
        let err = read_npz(&place.file()).unwrap_err().to_string();
        assert!(err.contains(&format!("{length} bytes expands to 80000128, more than 67108864")), "{err}");
        assert_eq!(read_npz_within(&place.file(), 80_000_128).unwrap()["zeros"].data.len(), n);
        assert!(read_npz_within(&place.file(), 80_000_127).is_err());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_named_as_the_system_does() {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let failure = RefCell::new(None);
        let mut file = full;
        let mut sink = CheckedSink { file: &mut file, failure: &failure };
        assert_eq!(sink.write(b"x").unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(sink.write(b"more").unwrap(), 4);
        assert_eq!(sink.seek(SeekFrom::End(0)).unwrap(), 0);
        assert_eq!(failure.take().unwrap().raw_os_error(), Some(28));
        for write in [write_npz, write_npz_compressed] {
            let e = write(Path::new("/dev/full"), &[("a".to_string(), ones(2_000_000))]).unwrap_err();
            assert_eq!(e.to_string(), "/dev/full: No space left on device (os error 28)");
        }
    }

    #[test]
    fn a_sum_that_is_wrong() {
        let place = Place::new();
        let mut bytes = place.archive(&[("a.npy", &npy(&ones(4)))], CompressionMethod::Stored);
        let at = bytes.windows(4).rposition(|w| w == 1f32.to_le_bytes()).unwrap();
        bytes[at] ^= 1;
        assert!(place.invalid(&bytes).contains("checksum"));
    }

    #[test]
    fn compression_that_is_not_implemented() {
        let place = Place::new();
        let mut bytes = place.archive(&[("a.npy", &npy(&ones(4)))], CompressionMethod::Stored);
        // bzip2
        patch(&mut bytes, 8, 10, &12u16.to_le_bytes());
        assert!(matches!(place.read(&bytes), Err(e) if e.kind() == Kind::Unsupported));
    }

    fn array() -> impl Strategy<Value = Array> {
        (vec(0usize..5, 0..4), 0..DType::ALL.len()).prop_flat_map(|(shape, dtype)| {
            let dtype = DType::ALL[dtype];
            let n: usize = shape.iter().product();
            vec(any::<u8>(), n * dtype.bytes()).prop_map(move |mut bytes| {
                if dtype == DType::Bool {
                    bytes.iter_mut().for_each(|b| *b &= 1);
                }
                let mut data = ArrayData::empty(dtype);
                assert!(data.extend_le(&bytes));
                Array { shape: shape.clone(), data }
            })
        })
    }

    /// Returns names and `.npy` bytes of arrays, for comparison: a NaN does not equal itself.
    fn bits(arrays: impl IntoIterator<Item = (String, Array)>) -> Vec<(String, Vec<u8>)> {
        arrays.into_iter().map(|(name, array)| (name, npy(&array))).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn archives_are_read_as_they_were_written(
            entries in proptest::collection::btree_map("[a-z0-9_.]{1,8}[a-z]", array(), 0..5),
            deflated: bool,
        ) {
            let entries: Vec<(String, Array)> = entries.into_iter().filter(|(n, _)| !n.ends_with(".npy")).collect();
            let place = Place::new();
            let write = if deflated { write_npz_compressed } else { write_npz };
            write(&place.file(), &entries).unwrap();
            prop_assert_eq!(bits(read_npz(&place.file()).unwrap()), bits(entries));
        }

        #[test]
        fn damaged_archives_never_panic(at in 0usize..700, value: u8, deflated: bool) {
            let place = Place::new();
            let method = if deflated { CompressionMethod::Deflated } else { CompressionMethod::Stored };
            let mut bytes = place.archive(&[("a.npy", &npy(&ones(60))), ("b.npy", &npy(&ones(1)))], method);
            let at = at % bytes.len();
            bytes[at] = value;
            // Many bytes carry no array data (times, permissions): then both arrays are read.
            if let Ok(arrays) = place.read(&bytes) {
                prop_assert_eq!(arrays.len(), 2);
            }
        }
    }
}
