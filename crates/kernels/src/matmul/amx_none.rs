//! Stands in for `amx` on processors other than x86-64.

use super::int8_codes::DecodedInt8;
use super::schedule::*;
use crate::memory::AlignedVec;
use crate::{Isa, Matrix, Pool};

/// Returns false: this processor has no tiles.
pub(super) fn transpose_tokens(
    _: Isa,
    _: &Pool,
    _: &Matrix<'_>,
    _: TokenSelection<'_>,
    _: &mut AlignedVec<[u8; 64]>,
) -> bool {
    false
}

/// Panics; nothing calls it without transposed tokens.
///
/// # Safety
/// Never called: no tokens are transposed, see [`transpose_tokens`].
pub(super) unsafe fn multiply_decoded(
    _: &DecodedInt8<'_>,
    _: &[usize],
    _: TokenSelection<'_>,
    _: &[[u8; 64]],
    _: &OutputRows<'_>,
) {
    unreachable!("tokens are not transposed here");
}
