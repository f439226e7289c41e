//! Whether a bundle still holds the bytes that its contract names.

use anemoe_bundle::{Chain, Error, file_sha256, package_sha256};
use rayon::prelude::*;
use std::path::Path;

/// Hashes every package, the embedding and the host's vectors; `done` is called after each package.
///
/// # Errors
/// A file is missing, or its bytes are others; the error says which.
pub fn verify(bundle: &Path, chain: &Chain, done: impl Fn() + Sync) -> Result<(), Error> {
    let differs = |file: &str, found: &str, wanted: &str| {
        let path = bundle.join(file);
        let what = format!("bytes: SHA-256 {found} where chain.json says {wanted}");
        if found == wanted { Ok(()) } else { Err(Error::invalid(path, what)) }
    };
    let mut files = vec![(&chain.embedding.file, &chain.embedding.sha256)];
    files.extend(chain.vectors.as_ref().map(|v| (&v.file, &v.sha256)));
    for (file, wanted) in files {
        differs(file, &file_sha256(&bundle.join(file))?, wanted)?;
    }
    chain.shards.par_iter().try_for_each(|s| {
        let path = bundle.join(&s.file);
        if !path.is_dir() {
            let gone = std::io::Error::new(std::io::ErrorKind::NotFound, "no such package");
            return Err(Error::io(path, gone));
        }
        differs(&s.file, &package_sha256(&path)?, &s.sha256)?;
        done();
        Ok(())
    })
}
