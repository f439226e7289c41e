//! AMX byte tiles, in inline assembly: the intrinsics are not stable.

use super::traits::LANES;
use std::arch::x86_64::*;

/// Tokens of a tile.
pub(crate) const TILE_TOKENS: usize = 16;
/// Vectors of 64 bytes in a tile of codes.
pub(crate) const TILE_VECTORS: usize = 16;

/// Multiplies byte tiles.
pub(crate) trait Multiply: Copy {
    /// Prepares this thread for tiles of `tokens` tokens, at most 16.
    ///
    /// # Safety
    /// The processor has the instructions.
    unsafe fn shape(self, tokens: usize);
    /// Multiplies `a`, signed bytes `[tokens, 64]`, by `b`, unsigned bytes `[16, 16, 4]`. Sum n of a token is
    /// `sum(a[4 k + j] * b[k][n][j])`. Only tokens that the thread is prepared for get sums.
    ///
    /// # Safety
    /// The processor has the instructions, and the thread is prepared.
    unsafe fn multiply(self, a: &[[u8; 64]; TILE_TOKENS], b: &[[u8; 64]; TILE_VECTORS], sums: &mut Sums);
    /// Releases the tiles.
    ///
    /// # Safety
    /// The processor has the instructions.
    unsafe fn end(self);
}

/// Holds the sums of a tile, a cache line per token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(64))]
pub(crate) struct Sums(pub [[i32; LANES]; TILE_TOKENS]);

/// Multiplies with the processor's tiles.
#[derive(Clone, Copy)]
pub(crate) struct Amx;

/// Holds the sizes of eight tiles, as `ldtilecfg` reads them.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Multiply for Amx {
    #[inline(always)]
    unsafe fn shape(self, tokens: usize) {
        // Tile 0 holds sums, tile 1 tokens, tile 2 codes.
        let mut config =
            Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        config.row_bytes[..3].fill(64);
        config.rows[..3].copy_from_slice(&[tokens as u8, tokens as u8, 16]);
        // SAFETY: 64 bytes are read; the caller promises the rest.
        unsafe {
            std::arch::asm!(
                "ldtilecfg [{}]",
                in(reg) &raw const config,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, preserves_flags)
            );
        }
    }

    #[inline(always)]
    unsafe fn multiply(self, a: &[[u8; 64]; TILE_TOKENS], b: &[[u8; 64]; TILE_VECTORS], sums: &mut Sums) {
        // SAFETY: the caller promises the same; at most 16 lines of each operand are read or written.
        unsafe {
            std::arch::asm!(
                "tilezero tmm0",
                "tileloadd tmm1, [{a} + {line} * 1]",
                "tileloadd tmm2, [{b} + {line} * 1]",
                "tdpbsud tmm0, tmm1, tmm2",
                "tilestored [{sums} + {line} * 1], tmm0",
                a = in(reg) a.as_ptr(),
                b = in(reg) b.as_ptr(),
                line = in(reg) 64usize,
                sums = in(reg) sums.0.as_mut_ptr(),
                out("tmm0") _, out("tmm1") _, out("tmm2") _,
                options(nostack, preserves_flags)
            );
        }
    }

    #[inline(always)]
    unsafe fn end(self) {
        // SAFETY: the caller promises the same.
        unsafe {
            std::arch::asm!(
                "tilerelease",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, preserves_flags)
            );
        }
    }
}

/// Tells whether the processor has byte tiles, this process may use them, and they compute as [`Multiply`] says.
pub(crate) fn is_available() -> bool {
    static AVAILABLE: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *AVAILABLE.get_or_init(|| has_tiles() && is_permitted() && works())
}

pub(crate) fn has_tiles() -> bool {
    const TILES_AND_BYTES: u32 = 1 << 24 | 1 << 25;
    std::arch::is_x86_feature_detected!("avx512vnni")
        && __cpuid(0).eax >= 7
        && __cpuid_count(7, 0).edx & TILES_AND_BYTES == TILES_AND_BYTES
        // The palette has at least three tiles of 16 rows of 64 bytes.
        && __cpuid(0).eax >= 0x1d
        && __cpuid_count(0x1d, 0).eax >= 1
        && __cpuid_count(0x1d, 1).ebx & 0xffff >= 64
        && __cpuid_count(0x1d, 1).ebx >> 16 >= 3
        && __cpuid_count(0x1d, 1).ecx & 0xffff >= 16
}

/// Asks Linux for permission to use tiles: Linux saves them only for processes that requested them. Tells whether it is granted.
#[cfg(target_os = "linux")]
pub(crate) fn is_permitted() -> bool {
    const ARCH_PRCTL: usize = 158;
    const REQUEST_PERMISSION: usize = 0x1023;
    const TILE_DATA: usize = 18;
    let done: isize;
    // SAFETY: the call changes the process's permissions and none of its memory; it writes two registers and its result.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => done,
            in("rdi") REQUEST_PERMISSION,
            in("rsi") TILE_DATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack)
        );
    }
    done == 0
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn is_permitted() -> bool {
    false
}

/// Tells whether one tile gives the sums of scalar code.
fn works() -> bool {
    let a: [[u8; 64]; TILE_TOKENS] =
        std::array::from_fn(|t| std::array::from_fn(|i| (t * 37 + i * 11) as u8));
    let b: [[u8; 64]; 16] = std::array::from_fn(|k| std::array::from_fn(|i| (k * 29 + i * 7) as u8));
    [TILE_TOKENS, 5].into_iter().all(|tokens| {
        let mut sums = Sums([[i32::MIN; LANES]; TILE_TOKENS]);
        let mut expected = sums;
        multiply_plainly(tokens, &a, &b, &mut expected);
        // SAFETY: `has_tiles` and `is_permitted` confirmed the tiles.
        unsafe {
            Amx.shape(tokens);
            Amx.multiply(&a, &b, &mut sums);
            Amx.end();
        }
        sums == expected
    })
}

/// Computes the sums of `tokens` tokens of a tile in scalar code; leaves other sums as they are.
pub(crate) fn multiply_plainly(tokens: usize, a: &[[u8; 64]], b: &[[u8; 64]], sums: &mut Sums) {
    let Sums(sums) = sums;
    for (sums, a) in sums.iter_mut().zip(a).take(tokens) {
        for (n, sum) in sums.iter_mut().enumerate() {
            *sum = (0..64).map(|i| i32::from(a[i] as i8) * i32::from(b[i / 4][4 * n + i % 4])).sum();
        }
    }
}
