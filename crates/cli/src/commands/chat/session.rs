//! Files of sessions: a conversation, and the sequence that it left in the model.
//!
//! ```text
//! magic | u64 bytes of JSON | JSON of the history | bytes of `Sequence::save` | SHA-256 of all before it, as 64 hex digits
//! ```

use anemoe_io::free_memory;
use anemoe_runtime::model::{Model, Sequence};
use anemoe_runtime::{Error, Result};
use anemoe_text::chat::History;
use std::io::{Read, Write};
use std::path::Path;

const MAGIC: &[u8; 18] = b"anemoe session v1\n";
/// Number of hex digits of a SHA-256.
const DIGEST: usize = 64;
/// Largest session file that is read, in bytes; the caches of a long conversation have some GB.
const MAX_BYTES: u64 = 64 << 30;

/// Checks that a session can be written to this file, before there is a session to lose.
///
/// # Errors
/// The folder is missing or cannot be written to, or the file is something other than a session.
pub fn check_place(path: &Path) -> Result<()> {
    check_replaced(path)?;
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !folder.is_dir() {
        let missing = std::io::Error::new(
            std::io::ErrorKind::NotFound,
            format!("there is no folder {}", folder.display()),
        );
        return Err(Error::io(path, missing));
    }
    anemoe_io::Temporary::file(folder).map_err(|e| Error::io(path, e))?;
    Ok(())
}

/// Refuses to replace a file that is no session.
fn check_replaced(path: &Path) -> Result<()> {
    let Ok(kind) = path.metadata() else { return Ok(()) };
    let mut start = [0; MAGIC.len()];
    let is_session = kind.is_file()
        && anemoe_io::open_input(path, u64::MAX).and_then(|mut file| file.read_exact(&mut start)).is_ok()
        && start == *MAGIC;
    if !is_session {
        let what = if kind.is_dir() {
            "session: it is a folder"
        } else {
            "session: it is another file, which is not replaced"
        };
        return Err(Error::invalid(path, what));
    }
    Ok(())
}

/// Writes a session; if that fails, the file stays as it was.
///
/// # Errors
/// The file cannot be written or is something other than a session, or the backend cannot read states.
pub fn save(path: &Path, model: &Model, sequence: &Sequence, history: &History) -> Result<()> {
    check_replaced(path)?;
    let json = history.to_json().to_string();
    let mut bytes = MAGIC.to_vec();
    bytes.extend((json.len() as u64).to_le_bytes());
    bytes.extend(json.as_bytes());
    bytes.extend(sequence.save(model)?);
    let digest = anemoe_bundle::sha256(&bytes);
    anemoe_io::write_atomic(path, |file| {
        file.write_all(&bytes)?;
        file.write_all(digest.as_bytes())
    })
    .map_err(|e| Error::io(path, e))
}

/// Reads a session of this model.
///
/// # Errors
/// The file cannot be read, is damaged, or is of another bundle.
pub fn load(path: &Path, model: &Model) -> Result<(Sequence, History)> {
    let most = free_memory().map_or(MAX_BYTES, |free| free.min(MAX_BYTES));
    let bytes = anemoe_io::read_input(path, most).map_err(|e| Error::io(path, e))?;
    parse(&bytes, model).map_err(|what| Error::invalid(path, format!("session: {what}")))
}

fn parse(bytes: &[u8], model: &Model) -> std::result::Result<(Sequence, History), String> {
    if !bytes.starts_with(MAGIC) {
        return Err("it does not begin as one of this version".into());
    }
    let (content, digest) = bytes.split_at_checked(bytes.len() - DIGEST.min(bytes.len())).unwrap_or_default();
    if anemoe_bundle::sha256(content).as_bytes() != digest {
        return Err("it is damaged: its bytes do not fit their hash".into());
    }
    let mut rest = content.get(MAGIC.len()..).unwrap_or_default();
    let length = rest.split_off(..8).and_then(|b| b.try_into().ok()).map(u64::from_le_bytes);
    let json = length.and_then(|n| usize::try_from(n).ok()).and_then(|n| rest.split_off(..n));
    let json = json.ok_or("it ends early")?;
    let json = anemoe_io::json::parse(json).map_err(|e| format!("JSON: {e}"))?;
    let history = History::from_json(&json)?;
    let vocabulary = model.chain().model.vocab_size;
    if history.known.ids.iter().any(|id| *id as usize >= vocabulary) {
        return Err("a token is outside the vocabulary".into());
    }
    let sequence = model.restore(rest).map_err(|e| e.to_string())?;
    Ok((sequence, history))
}
