use super::*;
use crate::test_data::{bytes, noise};

/// What is stored of some bytes.
fn put<L: Bytes>(v: L::Bytes) -> [u8; 64] {
    let mut out = [0; 64];
    L::put(v, &mut out);
    out
}

/// Every function gives what [`Plain`] gives.
fn check<L: Bytes>() {
    let data = bytes(1, 64 * 200);
    let (chunks, _) = data.as_chunks::<64>();
    let table: &[u8; 16] = data.first_chunk().unwrap();
    let (table_64, table_256) = (chunks[1], data.last_chunk().unwrap());
    for v in chunks {
        let (found, expected) = (L::bytes(v), Plain::bytes(v));
        assert_eq!(put::<L>(found), *v);
        for bits in [0, 0x80, 0x88] {
            assert_eq!(put::<L>(L::flip(found, bits)), Plain::flip(expected, bits));
        }
        let ((a, b), (c, d)) = (L::nibbles(found), Plain::nibbles(expected));
        assert_eq!((put::<L>(a), put::<L>(b)), (c, d));
        assert_eq!(put::<L>(L::find(L::table(table), a)), Plain::find(Plain::table(table), c));
        assert_eq!(put::<L>(L::unpack::<1>(&v[..8])), Plain::unpack::<1>(&v[..8]));
        assert_eq!(put::<L>(L::unpack::<2>(&v[..16])), Plain::unpack::<2>(&v[..16]));
        assert_eq!(put::<L>(L::unpack::<3>(&v[..24])), Plain::unpack::<3>(&v[..24]));
        let (at, expected_at) = (L::unpack::<6>(&v[..48]), Plain::unpack::<6>(&v[..48]));
        assert_eq!(put::<L>(at), expected_at);
        assert_eq!(put::<L>(L::find_64(&table_64, at)), Plain::find_64(&table_64, expected_at));
        assert_eq!(put::<L>(L::find_256(table_256, found)), Plain::find_256(table_256, expected));
    }
    for n in 0..=64 {
        let v = &chunks[0][..n];
        assert_eq!(put::<L>(L::bytes_of(v)), Plain::bytes_of(v));
    }
    let sums = |v: L::Sums| {
        let mut out = [0f32; LANES];
        L::sums(v).store(&mut out);
        out.map(|v| v as i32)
    };
    let (mut found, mut expected) = (L::no_sums(), Plain::no_sums());
    let mut extreme = [[255u8; 64], [0; 64], [128; 64], [127; 64]].into_iter().cycle();
    for (i, pair) in chunks.chunks_exact(2).enumerate() {
        // Not more than a float holds, and the numbers that 8 bits with a sign have, but for the lowest.
        if i % SCALED == 0 {
            (found, expected) = (L::no_sums(), Plain::no_sums());
        }
        let x = pair[1].map(|b| if b == 0x80 { 0x81 } else { b });
        let ends = [0x81u8, 127][i % 2];
        for (codes, x) in [(pair[0], x), (extreme.next().unwrap(), [ends; 64])] {
            found = L::dot(found, L::bytes(&codes), &x);
            expected = Plain::dot(expected, Plain::bytes(&codes), &x);
            assert_eq!(sums(found), expected, "{codes:?} times {x:?}");
        }
    }
    let values: Vec<f32> = noise(2, 64 * 50).into_iter().map(|v| (v * 508.0).round() * 0.5).collect();
    for v in values.chunks_exact(64) {
        let at = |j: usize| -> &[f32; LANES] { v[LANES * j..][..LANES].try_into().unwrap() };
        let (mut found, mut expected) = ([0; 64], [0; 64]);
        L::narrow([0, 1, 2, 3].map(|j| L::load(at(j))), &mut found);
        Plain::narrow([0, 1, 2, 3].map(|j| Plain::load(at(j))), &mut expected);
        assert_eq!(found, expected);
    }
}

#[test]
fn every_kind_of_bytes_gives_the_same() {
    for isa in Isa::available() {
        match isa {
            Isa::Scalar => check::<Plain>(),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => {
                use crate::lanes::neon::Neon;
                use std::arch::is_aarch64_feature_detected;
                check::<Neon<neon::Widening>>();
                if is_aarch64_feature_detected!("dotprod") {
                    check::<Neon<neon::SignedDots>>();
                }
                if is_aarch64_feature_detected!("i8mm") {
                    check::<Neon<neon::MixedDots>>();
                }
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => check::<crate::lanes::x86::Avx2>(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx => {
                if isa.for_bytes() == isa {
                    check::<crate::lanes::x86::Avx512>();
                }
            }
            _ => unreachable!("not available"),
        }
    }
}
