//! In place of `amx` on processors that are not x86-64.

use super::{Decoded, Taken, Target, Turned};
use crate::{Isa, Matrix, Pool};

/// Never: there are no tiles.
pub(crate) fn turn(_: Isa, _: &Pool, _: &Matrix<'_>, _: Taken<'_>, _: &mut Turned) -> bool {
    false
}

/// # Safety
/// There are no turned tokens, see [`turn`].
pub(super) unsafe fn in_tiles(_: &Decoded<'_>, _: &[usize], _: Taken<'_>, _: &[[u8; 64]], _: &Target<'_>) {
    unreachable!("tokens are not turned here");
}
