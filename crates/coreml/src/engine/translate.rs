//! Compilation of packages to Core ML's compiled models.

use super::failure::{Failure, caught};
use super::loading::{Handover, file_url};
use crate::{Error, Result};
use block2::RcBlock;
use objc2::rc::{Retained, autoreleasepool};
use objc2_core_ml::MLModel;
use objc2_foundation::{NSError, NSURL};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::sync_channel;

/// Compiles a package and moves the result to `target`, replacing what is there. Returns `target`.
///
/// # Errors
/// Core ML refuses the package, or a file operation fails.
pub fn compile(package: &Path, target: &Path) -> Result<PathBuf> {
    let made = autoreleasepool(|_| caught(|| compile_to_temporary(package)));
    let made = made.map_err(|e| e.at(package, "all"))?;
    let parent = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(|e| Error::io(parent, e))?;
    let beside = anemoe_io::Temporary::dir(parent, ".mlmodelc").map_err(|e| Error::io(parent, e))?;
    let inside = beside.path().join("model");
    // Core ML's temporary folder may be on another file system.
    if fs::rename(&made, &inside).is_err() {
        copy_folder(&made, &inside)?;
        fs::remove_dir_all(&made).map_err(|e| Error::io(&made, e))?;
    }
    if target.symlink_metadata().is_ok() {
        fs::rename(target, beside.path().join("old")).map_err(|e| Error::io(target, e))?;
    }
    fs::rename(&inside, target).map_err(|e| Error::io(target, e))?;
    Ok(target.to_path_buf())
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).map_err(|e| Error::io(to, e))?;
    for entry in fs::read_dir(from).map_err(|e| Error::io(from, e))? {
        let entry = entry.map_err(|e| Error::io(from, e))?;
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type().map_err(|e| Error::io(&path, e))?.is_dir() {
            copy_folder(&path, &target)?;
        } else {
            fs::copy(&path, &target).map_err(|e| Error::io(&path, e))?;
        }
    }
    Ok(())
}

fn compile_to_temporary(package: &Path) -> std::result::Result<PathBuf, Failure> {
    let url = file_url(package)?;
    let (send, receive) = sync_channel(1);
    let handler = RcBlock::new(move |made: *mut NSURL, error: *mut NSError| {
        // SAFETY: both live while the handler runs; a reference of this crate keeps the URL.
        let answer = unsafe {
            match Retained::retain(made) {
                Some(made) => Ok(Handover::new(made)),
                None => Err(error
                    .as_ref()
                    .map_or_else(|| Failure::Misfit("neither model nor error".into()), Failure::reported)),
            }
        };
        let _ = send.send(answer);
    });
    // SAFETY: the handler may run on any thread.
    unsafe { MLModel::compileModelAtURL_completionHandler(&url, &handler) };
    drop(handler);
    let answer = receive.recv().unwrap_or_else(|_| Err(Failure::Misfit("Core ML did not answer".into())));
    let path = answer?.into_inner().path().ok_or_else(|| Failure::Misfit("a URL without a path".into()))?;
    Ok(PathBuf::from(path.to_string()))
}
