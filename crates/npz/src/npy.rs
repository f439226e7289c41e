//! `.npy` files: one array, as a header and its elements.

use crate::array::elements;
use crate::npy_header::{Header, MAGIC, MAX_HEADER_BYTES, RefusedArray};
use crate::{Array, ArrayData, Error, Result};
use std::fs::File;
use std::io::{self, BufReader, BufWriter, ErrorKind, Read, Write};
use std::path::Path;

/// Bytes that are read or written at a time.
pub(crate) const PIECE: usize = 1 << 20;

/// Reads a `.npy` file.
///
/// # Errors
/// The file cannot be read, is no `.npy` file, is shorter or longer than its header says, or has an element type that is
/// not implemented.
pub fn read_npy(path: &Path) -> Result<Array> {
    let file = anemoe_io::open_input(path, u64::MAX).map_err(|e| Error::io(path, e))?;
    let length = file.metadata().map_err(|e| Error::io(path, e))?.len();
    read_array(&mut BufReader::new(file), length).map_err(|e| e.at(path, ""))
}

/// Writes a `.npy` file: beside `path` first, then renamed into place.
///
/// # Errors
/// The shape's product is not the number of elements, or a file operation fails; nothing half-written stays behind.
pub fn write_npy(path: &Path, array: &Array) -> Result<()> {
    check(array).map_err(|what| Error::invalid(path, what))?;
    write_atomic(path, |file| {
        let mut out = BufWriter::with_capacity(PIECE, file);
        write_array(&mut out, array)?;
        out.flush()
    })
}

/// Reason for which an array was not read; the file and the array's name are not known yet.
#[derive(Debug)]
pub(crate) enum ReadError {
    Io(io::Error),
    RefusedArray(RefusedArray),
}

impl ReadError {
    /// Makes the error that names the file and the array; `subject` is empty or ends with a space.
    pub fn at(self, path: &Path, subject: &str) -> Error {
        let path = path.to_path_buf();
        match self {
            ReadError::Io(source) => Error::io(path, source),
            ReadError::RefusedArray(RefusedArray::Invalid(what)) => {
                Error::invalid(path, format!("{subject}{what}"))
            }
            ReadError::RefusedArray(RefusedArray::Unsupported(what)) => {
                Error::unsupported(path, format!("{subject}{what}"))
            }
        }
    }
}

impl From<RefusedArray> for ReadError {
    fn from(r: RefusedArray) -> Self {
        ReadError::RefusedArray(r)
    }
}

impl From<io::Error> for ReadError {
    fn from(e: io::Error) -> Self {
        match e.kind() {
            // Kinds that a decompressor gives for broken data, and a file for an early end.
            ErrorKind::InvalidData | ErrorKind::InvalidInput | ErrorKind::UnexpectedEof => {
                invalid(format!("data: {e}"))
            }
            _ => ReadError::Io(e),
        }
    }
}

fn invalid(what: impl Into<String>) -> ReadError {
    ReadError::RefusedArray(RefusedArray::Invalid(what.into()))
}

/// Reads an array that fills `length` bytes exactly. Memory grows with the bytes that were read, not with claimed sizes.
pub(crate) fn read_array(from: &mut impl Read, length: u64) -> std::result::Result<Array, ReadError> {
    let mut magic = [0u8; 8];
    if length < magic.len() as u64 {
        return Err(invalid(format!("file: {length} bytes are too few for a .npy header")));
    }
    from.read_exact(&mut magic)?;
    if !magic.starts_with(MAGIC) {
        return Err(invalid("file: it does not start with the magic of .npy files"));
    }
    let mut size = [0u8; 4];
    let (width, version) = match (magic[6], magic[7]) {
        (1, 0) => (2, 1),
        (2, 0) => (4, 2),
        (3, 0) => (4, 3),
        (major, minor) => {
            let what = format!(".npy version {major}.{minor}; implemented are 1.0, 2.0 and 3.0");
            return Err(ReadError::RefusedArray(RefusedArray::Unsupported(what)));
        }
    };
    let fixed = magic.len() + width;
    if length < fixed as u64 {
        return Err(invalid(format!(
            "file: {length} bytes are too few for a .npy header of version {version}.0"
        )));
    }
    from.read_exact(&mut size[..width])?;
    let header_bytes = u32::from_le_bytes(size) as usize;
    if header_bytes > MAX_HEADER_BYTES {
        return Err(invalid(format!("header: {header_bytes} bytes, more than {MAX_HEADER_BYTES}")));
    }
    let Some(data_bytes) = length.checked_sub((fixed + header_bytes) as u64) else {
        return Err(invalid(format!("header: {header_bytes} bytes are more than the file has")));
    };
    let mut text = vec![0u8; header_bytes];
    from.read_exact(&mut text)?;
    let header = Header::parse(&text)?;

    let wanted = elements(&header.shape).and_then(|n| n.checked_mul(header.dtype.bytes()));
    if wanted.map(|n| n as u64) != Some(data_bytes) {
        let wanted = wanted.map_or("more bytes than 64 bits count".into(), |n| format!("{n} bytes"));
        let descr = header.dtype.descr();
        return Err(invalid(format!(
            "data: {data_bytes} bytes, but shape {:?} of {descr} has {wanted}",
            header.shape
        )));
    }
    let mut data = ArrayData::empty(header.dtype);
    let mut piece = Vec::new();
    let mut left = data_bytes;
    while left > 0 {
        // `PIECE` is a multiple of every element's size in bytes.
        let n = left.min(PIECE as u64) as usize;
        piece.resize(n, 0);
        from.read_exact(&mut piece)?;
        if matches!(data, ArrayData::Bool(_))
            && let Some(i) = piece.iter().position(|&b| b > 1)
        {
            let at = data_bytes - left + i as u64;
            return Err(invalid(format!("data: bool {at} is the byte {}, expected 0 or 1", piece[i])));
        }
        if !data.extend_le(&piece) {
            return Err(ReadError::Io(ErrorKind::OutOfMemory.into()));
        }
        left -= n as u64;
    }
    // One byte more than the array has. At an entry's end, the zip reader checks the checksum.
    if from.read(&mut [0u8; 1])? != 0 {
        return Err(invalid("data: bytes after the array"));
    }
    if header.fortran_order && header.shape.len() > 1 {
        data = data.fortran_to_c(&header.shape);
    }
    Ok(Array { shape: header.shape, data })
}

/// Checks that the shape's product is the number of elements; the error names both.
pub(crate) fn check(array: &Array) -> std::result::Result<(), String> {
    let n = array.data.len();
    match elements(&array.shape) {
        Some(wanted) if wanted == n => Ok(()),
        _ => Err(format!("array: {n} elements for shape {:?}", array.shape)),
    }
}

/// Writes the header and the elements of an array that [`check`] has accepted.
pub(crate) fn write_array(out: &mut impl Write, array: &Array) -> io::Result<()> {
    out.write_all(&Header::encode(array.data.dtype(), &array.shape))?;
    let n = array.data.len();
    let step = PIECE / array.data.dtype().bytes();
    let mut bytes = Vec::new();
    for start in (0..n).step_by(step) {
        bytes.clear();
        array.data.put_le(start..n.min(start + step), &mut bytes);
        out.write_all(&bytes)?;
    }
    Ok(())
}

/// Writes a file with [`anemoe_io::write_atomic`]; errors name the path.
pub(crate) fn write_atomic(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> Result<()> {
    anemoe_io::write_atomic(path, write).map_err(|e| Error::io(path, e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use anemoe_io::Kind;

    fn bytes_of(array: &Array) -> Vec<u8> {
        let mut out = Vec::new();
        write_array(&mut out, array).unwrap();
        out
    }

    fn read(bytes: &[u8]) -> Result<Array> {
        read_array(&mut &bytes[..], bytes.len() as u64).map_err(|e| e.at(Path::new("x.npy"), ""))
    }

    fn refused(bytes: &[u8]) -> String {
        read(bytes).unwrap_err().to_string()
    }

    fn example() -> Array {
        Array::new(vec![2, 3], vec![1.5f32, -2.0, 0.0, f32::MIN_POSITIVE, f32::MAX, f32::INFINITY]).unwrap()
    }

    /// Returns a `.npy` file of format `version`.0 with this dictionary and data.
    fn file(version: u8, dict: &str, data: &[u8]) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend([version, 0]);
        match version {
            1 => out.extend((dict.len() as u16).to_le_bytes()),
            _ => out.extend((dict.len() as u32).to_le_bytes()),
        }
        out.extend(dict.as_bytes());
        out.extend(data);
        out
    }

    #[test]
    fn what_is_written_is_read() {
        assert_eq!(read(&bytes_of(&example())).unwrap(), example());
        let scalar = Array::new(vec![], vec![7i64]).unwrap();
        assert_eq!(read(&bytes_of(&scalar)).unwrap(), scalar);
        let empty = Array::new(vec![3, 0, 2], vec![0u16; 0]).unwrap();
        assert_eq!(read(&bytes_of(&empty)).unwrap(), empty);
    }

    #[test]
    fn versions_two_and_three_are_read() {
        let dict = "{'descr': '<i2', 'fortran_order': False, 'shape': (2,), }\n";
        for version in [1, 2, 3] {
            let array = read(&file(version, dict, &[1, 0, 0xff, 0xff])).unwrap();
            assert_eq!(array, Array::new(vec![2], vec![1i16, -1]).unwrap());
        }
    }

    #[test]
    fn fortran_order_is_turned_around() {
        let dict = "{'descr': '|u1', 'fortran_order': True, 'shape': (2, 3), }\n";
        let array = read(&file(1, dict, &[0, 3, 1, 4, 2, 5])).unwrap();
        assert_eq!(array, Array::new(vec![2, 3], vec![0u8, 1, 2, 3, 4, 5]).unwrap());
        let dict = "{'descr': '|u1', 'fortran_order': True, 'shape': (4611686018427387904, 8, 0), }\n";
        assert!(read(&file(1, dict, &[])).unwrap().data.is_empty());
    }

    #[test]
    fn every_prefix_of_a_file_is_invalid() {
        let bytes = bytes_of(&example());
        for n in 0..bytes.len() {
            assert!(refused(&bytes[..n]).starts_with("x.npy: invalid"), "{n}");
        }
    }

    #[test]
    fn a_file_that_is_not_npy() {
        assert!(refused(b"PK\x03\x04 something else").contains("magic"));
    }

    #[test]
    fn a_version_that_does_not_exist() {
        assert!(refused(&file(9, "{}", &[])).contains("unsupported .npy version 9.0"));
    }

    #[test]
    fn a_header_that_claims_four_gigabytes() {
        let mut bytes = file(2, "{}", &[]);
        bytes[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(refused(&bytes).contains("4294967295 bytes"));
    }

    #[test]
    fn a_header_that_is_longer_than_the_file() {
        let mut bytes = file(1, "{}", &[]);
        bytes[8..10].copy_from_slice(&1000u16.to_le_bytes());
        assert!(refused(&bytes).contains("1000 bytes are more than the file has"));
    }

    #[test]
    fn a_shape_that_claims_more_than_the_file_has() {
        for dims in ["1000000000000,", "4611686018427387904, 4", "18446744073709551615, 2"] {
            let dict = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({dims}), }}");
            assert!(refused(&file(1, &dict, &[0; 16])).contains("data: 16 bytes, but shape"), "{dims}");
        }
    }

    #[test]
    fn bytes_behind_the_array() {
        let mut bytes = bytes_of(&example());
        bytes.push(0);
        assert!(refused(&bytes).contains("25 bytes, but shape [2, 3] of <f4 has 24"));
    }

    #[test]
    fn a_bool_that_is_neither() {
        let dict = "{'descr': '|b1', 'fortran_order': False, 'shape': (3,), }";
        assert!(refused(&file(1, dict, &[0, 1, 2])).contains("bool 2 is the byte 2"));
    }

    #[test]
    fn a_source_that_ends_before_its_length() {
        let bytes = bytes_of(&example());
        let err = read_array(&mut &bytes[..bytes.len() - 1], bytes.len() as u64).unwrap_err();
        assert!(matches!(err, ReadError::RefusedArray(RefusedArray::Invalid(_))), "{err:?}");
    }

    #[test]
    fn a_shape_that_is_not_the_data_is_not_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.npy");
        let array = Array { shape: vec![2, 2], data: vec![0f32; 3].into() };
        assert!(write_npy(&path, &array).unwrap_err().to_string().contains("3 elements for shape [2, 2]"));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn files_replace_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.npy");
        let long = Array::new(vec![700_000], (0..700_000i32).collect::<Vec<_>>()).unwrap();
        write_npy(&path, &long).unwrap();
        assert_eq!(read_npy(&path).unwrap(), long);
        write_npy(&path, &example()).unwrap();
        assert_eq!(read_npy(&path).unwrap(), example());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        assert!(read_npy(dir.path()).unwrap_err().kind() == Kind::Io);
        assert!(read_npy(&dir.path().join("none")).unwrap_err().kind() == Kind::Io);
    }
}
