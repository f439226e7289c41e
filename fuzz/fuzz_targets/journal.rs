//! `journal.jsonl`: what is read, and what an append makes of it.
#![no_main]

use anemoe_bundle::journal::{self, Event};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    anemoe_fuzz::write("journal.jsonl", input);
    let folder = anemoe_fuzz::folder();
    let Ok(before) = journal::read(folder) else { return };
    if journal::append(folder, Event::new("note", "done")).is_ok() {
        let after = journal::read(folder).expect("a journal is read behind an append");
        assert_eq!(after.events.len(), before.events.len() + 1);
        assert_eq!(after.events[..before.events.len()], before.events[..]);
    }
});
