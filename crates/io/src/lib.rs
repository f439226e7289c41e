//! Files (opened, written, replaced and removed with care) and random numbers, for every other crate.
//!
//! ```text
//! input    open_input, read_input, read_text     regular files only, at most a stated number of bytes
//! atomic   write_atomic                          a file is whole or absent
//! output   Output                                nothing is overwritten unless asked for, an input never
//! owned    OwnedDir                              writes and deletions in a folder of ours, never through a link
//! memory_budget  within, BudgetAllocator         what a program that came with a model may allocate
//! system_memory  free_memory and others          what the system tells of memory
//! ranged_file  RangedFile, RangedFiles           a file that is not here, read in ranges
//! random   Random                                one generator, the same bits on every machine
//! error    Error, Kind                           why something was refused
//! json     parse                                 objects with every key once
//! locked   locked                                a mutex, whatever became of its last holder
//! hex      hex                               bytes as text, of hashes above all
//! scratch  Scratch, Temporary                    what is temporary goes at the end, after Ctrl-C too
//! ```
//!
//! # Tests
//! A write replaces a whole file or nothing, and never through a link of a folder of ours; pipes, devices and inputs are not
//! overwritten; inputs are read up to their limit; what a killed process left is removed; random bits are those of the
//! published generator. The tests are beside the code and take less than a second.
#![deny(unsafe_code)]

mod atomic;
mod error;
mod hex;
mod input;
pub mod json;
mod locked;
pub mod memory_budget;
mod output;
mod owned;
mod random;
mod ranged_file;
mod scratch;
mod system_memory;

pub use atomic::{sync_dir, write_atomic};
pub use error::{Error, Kind, Result};
pub use hex::hex;
pub use input::{open_input, read_input, read_text};
pub use locked::locked;
pub use output::Output;
pub use owned::OwnedDir;
pub use random::Random;
pub use ranged_file::{RangedFile, RangedFiles};
pub use scratch::{Scratch, TEMPORARY, Temporary, remove_all_temporary};
pub use system_memory::{free_memory, held_memory, peak_memory};
