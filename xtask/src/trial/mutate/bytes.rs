//! Damages bytes of a file.

use super::super::choices::Choices;

/// Truncates the file, or flips, overwrites, removes, repeats or adds bytes.
pub fn damage_bytes(file: &mut Vec<u8>, r: &mut Choices) {
    let n = file.len();
    // Headers matter more than data: half of all places are in the first kilobyte.
    let at = if r.once_in(2) { r.below(n.min(1024)) } else { r.below(n) };
    let len = 1 + r.below(64.min(n - at.min(n)).max(1));
    let end = (at + len).min(n);
    match r.below(8) {
        0 => file.truncate(at),
        1 => file.truncate(n.saturating_sub(1 + r.below(16))),
        2 => {
            let more = 1 + r.below(64);
            file.extend((0..more).map(|_| r.bits() as u8));
        }
        3 if n > 0 => file[at] ^= 1 << r.below(8),
        4 => file[at..end].fill(*r.pick(&[0, 0xff, 0x7f, 0x80, b' '])),
        5 => {
            file.drain(at..end);
        }
        6 => {
            let piece = file[at..end].to_vec();
            file.splice(at..at, piece);
        }
        _ => overwrite_number(file, at, r),
    }
}

/// Overwrites 1, 2, 4 or 8 bytes with a number at which readers tend to fail.
pub fn overwrite_number(file: &mut [u8], at: usize, r: &mut Choices) {
    let value = r.edge().to_le_bytes();
    let width = *r.pick(&[1, 2, 4, 8]);
    for (to, from) in file.iter_mut().skip(at).zip(&value[..width]) {
        *to = *from;
    }
}
