use super::*;
use crate::test_data::{bytes, noise};

fn lanes<L: Lanes>(v: L) -> [f32; LANES] {
    let mut out = [0f32; LANES];
    v.store(&mut out);
    out
}

/// The same bits, where they are not NaN.
#[track_caller]
fn same(what: &str, found: &[f32], expected: &[f32]) {
    let equal = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
    assert!(found.iter().zip(expected).all(equal), "{what}: {found:?} for {expected:?}");
}

/// Every function gives what [`Plain`] gives, but products are not rounded before they are added to.
fn check<L: Lanes>() {
    let noise: Vec<f32> = noise(1, 48 * 20).into_iter().map(|v| v * 40.0).collect();
    let mut special = [0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0, -3.0, 1e-40].repeat(6);
    special.rotate_left(3);
    special[..LANES].reverse();
    for v in noise.chunks_exact(48).chain([special.as_slice()]) {
        let at = |i: usize| -> &[f32; LANES] { v[LANES * i..][..LANES].try_into().unwrap() };
        let (a, b, c) = (at(0), at(1), at(2));
        let by =
            |f: fn(f32, f32, f32) -> f32| -> [f32; LANES] { std::array::from_fn(|l| f(a[l], b[l], c[l])) };
        let (x, y, z) = (L::load(a), L::load(b), L::load(c));
        let (p, q, r) = (Plain::load(a), Plain::load(b), Plain::load(c));
        same("add", &lanes(x.add(y)), &lanes(p.add(q)));
        same("mul", &lanes(x.mul(y)), &lanes(p.mul(q)));
        same("div", &lanes(x.div(y)), &lanes(p.div(q)));
        same("min", &lanes(x.min(y)), &lanes(p.min(q)));
        same("max", &lanes(x.max(y)), &lanes(p.max(q)));
        same("if_below", &lanes(x.if_below(y, z, x)), &lanes(p.if_below(q, r, p)));
        same("mul_add", &lanes(x.mul_add(y, z)), &by(|a, b, c| a.mul_add(b, c)));
        same("neg_mul_add", &lanes(x.neg_mul_add(y, z)), &by(|a, b, c| (-a).mul_add(b, c)));
        same("total", &[x.total()], &[p.total()]);
        same("totals", &L::totals([x, y, z, y]), &Plain::totals([p, q, r, q]));
        let mut vectors = [x; LANES];
        for (i, v) in vectors.iter_mut().enumerate() {
            let mut rotated = [a, b, c][i % 3].to_owned();
            rotated.rotate_left(i);
            *v = L::load(&rotated);
        }
        let mut quarters = [x; 4];
        for (quarters, v) in quarters.iter_mut().zip(vectors.as_chunks::<4>().0) {
            *quarters = L::quarters(*v);
        }
        same("totals_of_quarters", &lanes(L::totals_of_quarters(quarters)), &vectors.map(L::total));
        for (i, turned) in L::turn(vectors).into_iter().enumerate() {
            let column: [f32; LANES] = std::array::from_fn(|j| lanes(vectors[j])[i]);
            same("turn", &lanes(turned), &column);
        }
        if v.iter().all(|v| v.is_finite()) {
            let zero = [0f32; LANES];
            same("round", &lanes(x.round().add(L::load(&zero))), &by(|a, _, _| a.round_ties_even() + 0.0));
            assert_eq!(x.least(), p.least());
        }
    }
    let halves = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.49, 1e6, -4e6].map(|v| (v, f32::round_ties_even(v)));
    for (v, expected) in halves {
        assert_eq!(lanes(L::splat(v).round()), [expected; LANES]);
    }
    for first in (-126..=112).step_by(2) {
        let powers = std::array::from_fn(|l| (first + l as i32) as f32);
        same("power", &lanes(L::load(&powers).power_of_two()), &powers.map(f32::exp2));
    }
}

/// The lowest bytes of integers.
fn lowest<L: Lanes>(v: L::Ints) -> [f32; LANES] {
    lanes(L::lookup_256(&std::array::from_fn(|i| i as f32), v))
}

fn check_conversions<L: Lanes>() {
    let data = bytes(2, 512);
    let (table, small): ([f32; 64], [f32; LANES]) =
        (noise(3, 64).try_into().unwrap(), noise(4, LANES).try_into().unwrap());
    for first in 0..100 {
        let data = &data[first..];
        macro_rules! alike {
            ($name:literal, $of:ident, $bytes:expr) => {{
                let (v, expected) = (L::$of($bytes), Plain::$of($bytes));
                for bits in 0..29 {
                    let (v, expected) = (L::shift_right(v, bits), Plain::shift_right(expected, bits));
                    same($name, &lowest::<L>(v), &lowest::<Plain>(expected));
                    same($name, &lanes(L::lookup_64(&table, v)), &lanes(Plain::lookup_64(&table, expected)));
                    let found = lanes(L::lookup(L::load(&small), v));
                    same($name, &found, &lanes(Plain::lookup(Plain::load(&small), expected)));
                }
            }};
        }
        alike!("ints", ints, data.first_chunk().unwrap());
        alike!("ints_of", ints_of, &data[..first.min(64)]);
        alike!("ints_u16", ints_u16, data.first_chunk().unwrap());
        alike!("ints_u8", ints_u8, data.first_chunk().unwrap());
        for stride in [3, 6] {
            let data = &data[..stride * 15 + 3];
            let (v, expected) = (L::ints_u24(data, stride), Plain::ints_u24(data, stride));
            for bits in 0..24 {
                let (v, expected) = (L::shift_right(v, bits), Plain::shift_right(expected, bits));
                same("ints_u24", &lowest::<L>(v), &lowest::<Plain>(expected));
            }
        }
        let short = data.first_chunk().unwrap();
        same("from_i8", &lanes(L::from_i8(short)), &lanes(Plain::from_i8(short)));
        same("from_u8", &lanes(L::from_u8(short)), &lanes(Plain::from_u8(short)));
        let halves = data.first_chunk().unwrap();
        same("from_f16", &lanes(L::from_f16(halves)), &lanes(Plain::from_f16(halves)));
        let numbers = data.first_chunk().unwrap();
        same("from_f32", &lanes(L::from_f32(numbers)), &lanes(Plain::from_f32(numbers)));
    }
}

#[test]
fn every_kind_of_lanes_gives_the_same_bits() {
    for isa in crate::Isa::available() {
        match isa {
            crate::Isa::Scalar => check_conversions::<Plain>(),
            #[cfg(target_arch = "aarch64")]
            crate::Isa::Neon => {
                check::<neon::Neon>();
                check_conversions::<neon::Neon>();
            }
            #[cfg(target_arch = "x86_64")]
            crate::Isa::Avx2 => {
                check::<x86::Avx2>();
                check_conversions::<x86::Avx2>();
            }
            #[cfg(target_arch = "x86_64")]
            crate::Isa::Avx512 | crate::Isa::Amx => {
                check::<x86::Avx512>();
                check_conversions::<x86::Avx512>();
            }
            _ => unreachable!("not available"),
        }
    }
}
