//! Files (opened, written, replaced and removed with care) and random numbers, for every other crate.
//!
//! ```text
//! input    open_regular, read_text, without_mark  regular files only, at most a stated number of bytes
//! atomic   write_atomic                          a file is whole or absent
//! output   Output                                nothing is overwritten unless asked for, an input never
//! owned    OwnedDir                              writes and deletions in an owned folder, never through a link
//! reporting_allocator  ReportingAllocator         says so where no memory is left
//! system_memory  free_memory and others          memory of the system and of this process
//! ranged_file  RangedFile, RangedFiles           files elsewhere, read in ranges
//! random   Random                                the one generator, the same bits on every machine
//! error    Error, Kind                           the error type of every crate
//! json     parse                                 JSON whose objects have every key once
//! locked   locked                                locks a mutex, even if an earlier holder panicked
//! hex      hex                                   bytes as hexadecimal text
//! split_names  split_parts                       the files of a split GGUF model, from the name of one
//! scratch  Scratch, Temporary                    temporary files, removed at the end and after Ctrl-C
//! ```
//!
//! # Tests
//! A write replaces a whole file or nothing, and never goes through a link of an owned folder. Pipes, devices and
//! inputs are not overwritten. Inputs are read up to their limit. Files that a killed process left are removed. Random
//! bits are those of the published generator. The tests are beside the code and take less than a second.
#![deny(unsafe_code)]

mod atomic;
mod error;
mod hex;
mod input;
pub mod json;
mod locked;
mod output;
mod owned;
mod path_bytes;
mod random;
mod ranged_file;
mod reporting_allocator;
mod scratch;
mod split_names;
mod system_memory;
pub mod words;

pub use atomic::{sync_dir, write_atomic};
pub use error::{Error, Kind, Result};
pub use hex::hex;
pub use input::{is_web_page, open_input, open_regular, read_input, read_text, without_mark};
pub use locked::locked;
pub use output::Output;
pub use owned::OwnedDir;
pub use path_bytes::{path_of, split_once};
pub use random::Random;
pub use ranged_file::{RangedFile, RangedFiles};
pub use reporting_allocator::{ReportingAllocator, report_as_json};
pub use scratch::{Scratch, TEMPORARY, Temporary, remove_all_temporary};
pub use split_names::split_parts;
pub use system_memory::{free_memory, held_memory, peak_memory, proc_bytes};
