//! Hashes of files and packages, and atomic writes.

use crate::{Error, Result};
use anemoe_io::{hex, open_input};
use sha2::{Digest, Sha256};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// Writes `bytes` to a file beside `path`, flushes the file to disk and renames it into place, as
/// [`anemoe_io::write_atomic`].
///
/// # Errors
/// A file operation fails; no half-written file is left.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    anemoe_io::write_atomic(path, |file| file.write_all(bytes)).map_err(|e| Error::io(path, e))
}

fn hash_into(path: &Path, hasher: &mut Sha256) -> Result<()> {
    let mut file = open_input(path, u64::MAX).map_err(|e| Error::io(path, e))?;
    let mut buf = vec![0u8; 1 << 20];
    loop {
        let n = file.read(&mut buf).map_err(|e| Error::io(path, e))?;
        if n == 0 {
            return Ok(());
        }
        hasher.update(&buf[..n]);
    }
}

/// Returns the SHA-256 of a file, in hexadecimal.
///
/// # Errors
/// The file cannot be read.
pub fn file_sha256(path: &Path) -> Result<String> {
    let mut hasher = Sha256::new();
    hash_into(path, &mut hasher)?;
    Ok(hex(hasher.finalize()))
}

/// Returns the SHA-256 of bytes, in hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    hex(Sha256::digest(bytes))
}

/// Largest file that [`sampled_sha256`] hashes whole, in bytes.
const WHOLE: u64 = 64 << 20;
/// Number of blocks that are hashed of a larger file.
const SAMPLED_BLOCKS: u64 = 2048;
/// Bytes of a block.
const SAMPLED_BLOCK: usize = 4096;

/// Returns the SHA-256 of a file's contents, or of its length and samples where it is larger than 64 MiB: 2048 blocks
/// of 4 KiB, evenly spread from the first byte to the last. For files that are too large to be read again and again.
/// In hexadecimal.
///
/// # Errors
/// The file cannot be read.
pub fn sampled_sha256(path: &Path) -> Result<String> {
    use std::io::{Read, Seek, SeekFrom};
    let failed = |e| Error::io(path, e);
    let mut file = open_input(path, u64::MAX).map_err(failed)?;
    let len = file.metadata().map_err(failed)?.len();
    if len <= WHOLE {
        return file_sha256(path);
    }
    let mut hasher = Sha256::new();
    hasher.update(len.to_le_bytes());
    let mut block = vec![0u8; SAMPLED_BLOCK];
    for i in 0..SAMPLED_BLOCKS {
        let at =
            (u128::from(len - SAMPLED_BLOCK as u64) * u128::from(i) / u128::from(SAMPLED_BLOCKS - 1)) as u64;
        file.seek(SeekFrom::Start(at)).map_err(failed)?;
        file.read_exact(&mut block).map_err(failed)?;
        hasher.update(&block);
    }
    Ok(hex(hasher.finalize()))
}

/// Index of a package's files. Tools rewrite it when they open a package, so it is not part of a package's hash.
pub const MANIFEST: &str = "Manifest.json";

/// Returns the files of a package, sorted by path, without those whose names begin with a dot: file managers leave
/// them in folders that they show.
///
/// # Errors
/// A folder cannot be read.
pub fn package_files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    walk(dir, &mut files)?;
    files.sort();
    Ok(files)
}

/// Returns the bytes of all files of a package, added up.
///
/// # Errors
/// A folder cannot be read, or the size of a file.
pub fn package_bytes(dir: &Path) -> Result<u64> {
    package_files(dir)?.iter().map(|file| Ok(file.metadata().map_err(|e| Error::io(file, e))?.len())).sum()
}

/// Returns the SHA-256 over the model and the weights of a package, in hexadecimal. Every file but the manifest is
/// hashed, in the order of relative paths: path, a zero byte, length as 8 little-endian bytes, contents.
///
/// # Errors
/// A file cannot be read.
pub fn package_sha256(dir: &Path) -> Result<String> {
    hash_package(dir, None)
}

/// Returns the hash that [`package_sha256`] would give if the package's file `file` held `bytes`.
///
/// # Errors
/// A file cannot be read.
pub fn package_sha256_with(dir: &Path, file: &Path, bytes: &[u8]) -> Result<String> {
    hash_package(dir, Some((file, bytes)))
}

fn hash_package(dir: &Path, other: Option<(&Path, &[u8])>) -> Result<String> {
    let mut hasher = Sha256::new();
    for file in package_files(dir)? {
        let relative = file.strip_prefix(dir).unwrap_or(&file);
        if relative == Path::new(MANIFEST) {
            continue;
        }
        let name: Vec<String> = relative.iter().map(|c| c.to_string_lossy().into_owned()).collect();
        hasher.update(name.join("/").as_bytes());
        hasher.update([0]);
        if let Some((_, bytes)) = other.filter(|(path, _)| *path == file) {
            hasher.update((bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
            continue;
        }
        let len = std::fs::metadata(&file).map_err(|e| Error::io(&file, e))?.len();
        hasher.update(len.to_le_bytes());
        hash_into(&file, &mut hasher)?;
    }
    Ok(hex(hasher.finalize()))
}

fn walk(dir: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(dir).map_err(|e| Error::io(dir, e))? {
        let entry = entry.map_err(|e| Error::io(dir, e))?;
        // Type of the entry itself: a link is hashed as the file that it names, and never followed as a folder.
        if entry.file_type().map_err(|e| Error::io(entry.path(), e))?.is_dir() {
            walk(&entry.path(), files)?;
        } else if !entry.file_name().as_encoded_bytes().starts_with(b".") {
            files.push(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_hash_depends_on_names_and_contents() {
        let dir = tempfile::tempdir().unwrap();
        let make = |name: &str, files: &[(&str, &[u8])]| {
            let root = dir.path().join(name);
            for (file, bytes) in files {
                let path = root.join(file);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, bytes).unwrap();
            }
            package_sha256(&root).unwrap()
        };
        let a = make("a", &[("x/1", b"one"), ("2", b"two")]);
        assert_eq!(a, make("b", &[("2", b"two"), ("x/1", b"one")]));
        assert_ne!(a, make("c", &[("x/1", b"one"), ("2", b"twO")]));
        assert_ne!(a, make("d", &[("x/3", b"one"), ("2", b"two")]));
        assert_ne!(make("e", &[("a", b"bc")]), make("f", &[("ab", b"c")]));
        let c = dir.path().join("c");
        assert_eq!(package_sha256_with(&c, &c.join("2"), b"two").unwrap(), a);
        assert_ne!(package_sha256_with(&c, &c.join("2"), b"tw").unwrap(), a);
        assert_ne!(package_sha256_with(&c, &c.join("3"), b"two").unwrap(), a);
    }

    #[test]
    fn a_large_file_is_sampled_from_its_first_byte_to_its_last() {
        use std::io::{Seek, SeekFrom, Write};
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let mut file = std::fs::File::create(&path).unwrap();
        file.set_len(WHOLE + 12345).unwrap();
        let blank = sampled_sha256(&path).unwrap();
        let mut seen = vec![blank];
        for at in [0, WHOLE + 12344, WHOLE / 2] {
            // A run of 33,000 bytes, longer than the distance between two blocks, meets a block.
            file.seek(SeekFrom::Start(at.min(WHOLE + 12345 - 33000 * u64::from(at == WHOLE / 2)))).unwrap();
            let run = if at == WHOLE / 2 { 33000 } else { 1 };
            file.write_all(&vec![7; run]).unwrap();
            let hash = sampled_sha256(&path).unwrap();
            assert!(!seen.contains(&hash), "{at}");
            seen.push(hash);
        }
        file.set_len(WHOLE).unwrap();
        assert_eq!(sampled_sha256(&path).unwrap(), file_sha256(&path).unwrap());
    }

    #[test]
    fn a_write_into_a_missing_folder_names_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        let err = write_atomic(&dir.path().join("no/f"), b"x").unwrap_err();
        assert!(err.to_string().contains("no"), "{err}");
    }
}
