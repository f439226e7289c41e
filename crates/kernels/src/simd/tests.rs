use super::*;
use crate::activations::INT8_BLOCKS_PER_SCALE as BLOCKS_PER_SCALE;
use crate::test_data::{bytes, noise};

fn lanes<L: F32x16>(v: L) -> [f32; LANES] {
    let mut out = [0f32; LANES];
    v.store(&mut out);
    out
}

/// Checks that bits are equal, except where both are NaN.
#[track_caller]
fn same(what: &str, found: &[f32], expected: &[f32]) {
    let equal = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
    assert!(found.iter().zip(expected).all(equal), "{what}: {found:?} for {expected:?}");
}

/// Checks that every function gives the bits of [`Scalar`], except that products are not rounded before they are added.
fn check<L: F32x16>() {
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
        let (p, q, r) = (Scalar::load(a), Scalar::load(b), Scalar::load(c));
        same("add", &lanes(x.add(y)), &lanes(p.add(q)));
        same("mul", &lanes(x.mul(y)), &lanes(p.mul(q)));
        same("div", &lanes(x.div(y)), &lanes(p.div(q)));
        same("min", &lanes(x.min(y)), &lanes(p.min(q)));
        same("max", &lanes(x.max(y)), &lanes(p.max(q)));
        same("if_below", &lanes(x.if_below(y, z, x)), &lanes(p.if_below(q, r, p)));
        same("mul_add", &lanes(x.mul_add(y, z)), &by(|a, b, c| a.mul_add(b, c)));
        same("neg_mul_add", &lanes(x.neg_mul_add(y, z)), &by(|a, b, c| (-a).mul_add(b, c)));
        same("total", &[x.horizontal_sum()], &[p.horizontal_sum()]);
        same("totals", &L::horizontal_sums([x, y, z, y]), &Scalar::horizontal_sums([p, q, r, q]));
        let mut vectors = [x; LANES];
        for (i, v) in vectors.iter_mut().enumerate() {
            let mut rotated = [a, b, c][i % 3].to_owned();
            rotated.rotate_left(i);
            *v = L::load(&rotated);
        }
        let mut partial_sums = [x; 4];
        for (partial_sums, v) in partial_sums.iter_mut().zip(vectors.as_chunks::<4>().0) {
            *partial_sums = L::partial_sums(*v);
        }
        same(
            "finish_partial_sums",
            &lanes(L::finish_partial_sums(partial_sums)),
            &vectors.map(L::horizontal_sum),
        );
        for (i, transposed) in L::transpose(vectors).into_iter().enumerate() {
            let column: [f32; LANES] = std::array::from_fn(|j| lanes(vectors[j])[i]);
            same("transpose", &lanes(transposed), &column);
        }
        if v.iter().all(|v| v.is_finite()) {
            let zero = [0f32; LANES];
            same("round", &lanes(x.round().add(L::load(&zero))), &by(|a, _, _| a.round_ties_even() + 0.0));
            assert_eq!(x.argmin(), p.argmin());
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

/// Returns the lowest byte of each integer.
fn lowest<L: F32x16>(v: L::U32s) -> [f32; LANES] {
    lanes(L::lookup_256(&std::array::from_fn(|i| i as f32), v))
}

fn check_conversions<L: F32x16>() {
    let data = bytes(2, 512);
    let (table, small): ([f32; 64], [f32; LANES]) =
        (noise(3, 64).try_into().unwrap(), noise(4, LANES).try_into().unwrap());
    for first in 0..100 {
        let data = &data[first..];
        macro_rules! alike {
            ($name:literal, $of:ident, $bytes:expr) => {{
                let (v, expected) = (L::$of($bytes), Scalar::$of($bytes));
                for bits in 0..29 {
                    let (v, expected) = (L::shift_right(v, bits), Scalar::shift_right(expected, bits));
                    same($name, &lowest::<L>(v), &lowest::<Scalar>(expected));
                    same($name, &lanes(L::lookup_64(&table, v)), &lanes(Scalar::lookup_64(&table, expected)));
                    let found = lanes(L::lookup(L::load(&small), v));
                    same($name, &found, &lanes(Scalar::lookup(Scalar::load(&small), expected)));
                }
            }};
        }
        alike!("load_u32", load_u32, data.first_chunk().unwrap());
        alike!("load_u16", load_u16, data.first_chunk().unwrap());
        alike!("load_u8", load_u8, data.first_chunk().unwrap());
        let (of_64, of_256) =
            (std::array::from_fn(|i| i as u16 * 37), std::array::from_fn(|i| i as u16 * 13));
        let table = L::load_half_table(&of_64);
        let found = L::lookup_halves_6(table, data.first_chunk().unwrap());
        let expected = Scalar::lookup_halves_6(of_64, data.first_chunk().unwrap());
        let bytes = data.first_chunk().unwrap();
        let found = found.into_iter().chain([L::lookup_halves_8(&of_256, bytes)]);
        let expected = expected.into_iter().chain([Scalar::lookup_halves_8(&of_256, bytes)]);
        for (v, e) in found.zip(expected) {
            for second in [false, true] {
                let (v, e) = (lanes(L::half_vector(v, second)), lanes(Scalar::half_vector(e, second)));
                same("halves", &v, &e);
            }
        }
        for stride in [3, 6] {
            let data = &data[..stride * 15 + 3];
            let (v, expected) = (L::load_u24(data, stride), Scalar::load_u24(data, stride));
            // The byte above the 24 bits is undefined.
            for bits in 0..=16 {
                let (v, expected) = (L::shift_right(v, bits), Scalar::shift_right(expected, bits));
                same("load_u24", &lowest::<L>(v), &lowest::<Scalar>(expected));
            }
        }
        let short = data.first_chunk().unwrap();
        same("from_i8", &lanes(L::from_i8(short)), &lanes(Scalar::from_i8(short)));
        same("from_u8", &lanes(L::from_u8(short)), &lanes(Scalar::from_u8(short)));
        let halves = data.first_chunk().unwrap();
        same("from_f16", &lanes(L::from_f16(halves)), &lanes(Scalar::from_f16(halves)));
        let numbers = data.first_chunk().unwrap();
        same("from_f32", &lanes(L::from_f32(numbers)), &lanes(Scalar::from_f32(numbers)));
    }
}

/// Returns a vector's bytes in memory order.
fn put<L: U8x64>(v: L::Bytes) -> [u8; 64] {
    let mut out = [0; 64];
    L::store_bytes(v, &mut out);
    out
}

/// Checks that unpacked elements find the entries of a table.
fn check_unpacking<L: U8x64, const BITS: usize>(v: &[u8], table: &[u8; 64]) {
    let repeated = std::array::from_fn(|i| table[i % (1 << BITS.min(4))]);
    let found = L::unpack::<BITS>(v).map(|at| match BITS {
        6 => put::<L>(L::lookup_bytes_64(table, at)),
        _ => put::<L>(L::lookup_bytes_16(L::load_byte_table(&repeated), at)),
    });
    let bit = |i: usize| v[i / 8] >> (i % 8) & 1;
    let element = |i: usize| (0..BITS).map(|b| usize::from(bit(BITS * i + b)) << b).sum::<usize>();
    assert_eq!(found.as_flattened(), (0..128).map(|i| table[element(i)]).collect::<Vec<_>>());
}

/// Checks that every byte function gives the results of [`Scalar`].
fn check_bytes<L: U8x64>() {
    let data = bytes(1, 64 * 200);
    let (chunks, _) = data.as_chunks::<64>();
    let table: &[u8; 16] = data.first_chunk().unwrap();
    let (table_64, table_256) = (chunks[1], data.last_chunk().unwrap());
    for v in chunks {
        let (found, expected) = (L::load_bytes(v), Scalar::load_bytes(v));
        assert_eq!(put::<L>(found), *v);
        for bits in [0, 0x80, 0x88] {
            assert_eq!(put::<L>(L::xor_bytes(found, bits)), Scalar::xor_bytes(expected, bits));
        }
        let ((a, b), (c, d)) = (L::split_nibbles(found), Scalar::split_nibbles(expected));
        assert_eq!((put::<L>(a), put::<L>(b)), (c, d));
        assert_eq!(
            put::<L>(L::lookup_bytes_16(L::load_byte_table(table), a)),
            Scalar::lookup_bytes_16(Scalar::load_byte_table(table), c)
        );
        assert_eq!(
            put::<L>(L::lookup_bytes_256(table_256, found)),
            Scalar::lookup_bytes_256(table_256, expected)
        );
    }
    for v in data.chunks_exact(96) {
        check_unpacking::<L, 1>(v, &table_64);
        check_unpacking::<L, 2>(v, &table_64);
        check_unpacking::<L, 3>(v, &table_64);
        check_unpacking::<L, 6>(v, &table_64);
    }
    for n in 0..=64 {
        let v = &chunks[0][..n];
        assert_eq!(put::<L>(L::load_partial_bytes(v)), Scalar::load_partial_bytes(v));
    }
    let sums = |v: L::Sums| {
        let mut out = [0f32; LANES];
        L::sums_to_f32(v).store(&mut out);
        out.map(|v| v as i32)
    };
    let (mut found, mut expected) = (L::zero_sums(), Scalar::zero_sums());
    let mut extreme = [[255u8; 64], [0; 64], [128; 64], [127; 64]].into_iter().cycle();
    for (i, pair) in chunks.chunks_exact(2).enumerate() {
        // Integers that a float holds exactly, and all signed 8-bit numbers but the lowest.
        if i % BLOCKS_PER_SCALE == 0 {
            (found, expected) = (L::zero_sums(), Scalar::zero_sums());
        }
        let x = pair[1].map(|b| if b == 0x80 { 0x81 } else { b });
        let ends = [0x81u8, 127][i % 2];
        for (codes, x) in [(pair[0], x), (extreme.next().unwrap(), [ends; 64])] {
            found = L::dot_u8i8(found, L::load_bytes(&codes), &x);
            expected = Scalar::dot_u8i8(expected, Scalar::load_bytes(&codes), &x);
            assert_eq!(sums(found), expected, "{codes:?} times {x:?}");
        }
    }
    let values: Vec<f32> = noise(2, 64 * 50).into_iter().map(|v| (v * 508.0).round() * 0.5).collect();
    for v in values.chunks_exact(64) {
        let at = |j: usize| -> &[f32; LANES] { v[LANES * j..][..LANES].try_into().unwrap() };
        let (mut found, mut expected) = ([0; 64], [0; 64]);
        L::pack_i8([0, 1, 2, 3].map(|j| L::load(at(j))), &mut found);
        Scalar::pack_i8([0, 1, 2, 3].map(|j| Scalar::load(at(j))), &mut expected);
        assert_eq!(found, expected);
    }
}

/// Checks that registers hold the contents of vectors, and that words have the sums of [`Scalar`].
fn check_registers<L: I16x32>() {
    let (data, table) = (bytes(3, 64 * 60), noise(4, 16));
    let table: [i16; 16] = std::array::from_fn(|i| (table[i] * 65_000.0) as i16);
    let (found, expected) = (L::load_i16_table(&table), Scalar::load_i16_table(&table));
    let registers = || 0..L::REGISTERS_PER_VECTOR;
    let sums = |of: &dyn Fn(usize) -> L::SumRegister| {
        let mut out = [0f32; LANES];
        registers().for_each(|r| L::store_register(L::sum_register_to_f32(of(r)), &mut out, r));
        out
    };
    for three in data.as_chunks::<64>().0.as_chunks::<3>().0 {
        let [at, a, b] = three;
        let (x, y, z) = ([1.5f32; LANES], std::array::from_fn(|l| l as f32), [-0.25; LANES]);
        let mut out = [0f32; LANES];
        for r in registers() {
            let load = |v| L::load_register(v, r);
            L::store_register(L::mul_add_register(load(&x), load(&y), load(&z)), &mut out, r);
        }
        same("mul_add_register", &out, &lanes(L::load(&x).mul_add(L::load(&y), L::load(&z))));
        // Words of at most 8 bits, whose sums f32 holds exactly.
        let words = |v: &[u8; 64]| {
            let mut words = *v;
            words.as_chunks_mut::<2>().0.iter_mut().for_each(|w| *w = i16::from(w[0]).to_le_bytes());
            words
        };
        let (a, b) = (words(a), words(b));
        let dot = |r| {
            L::dot_word_register(
                L::zero_sum_register(),
                L::load_word_register(&a, r),
                L::load_word_register(&b, r),
            )
        };
        let exact = Scalar::dot_i16(Scalar::zero_sums(), a, &b).map(|v| v as f32);
        assert_eq!(sums(&dot), exact);
        let looked_up = Scalar::lookup_word_registers(expected, at, 0);
        let one = words(&[1; 64]);
        for (j, words) in looked_up.into_iter().enumerate() {
            let dot = |r| {
                let w = L::lookup_word_registers(found, at, r)[j];
                L::dot_word_register(L::zero_sum_register(), w, L::load_word_register(&one, r))
            };
            assert_eq!(sums(&dot), Scalar::dot_i16(Scalar::zero_sums(), words, &one).map(|v| v as f32));
        }
        let widened = L::widen_codes(L::load_bytes(at)).map(put::<L>);
        assert_eq!(widened, Scalar::widen_codes(*at));
        for (i, words) in Scalar::widen_signed_register(at, 0).into_iter().enumerate() {
            let dot = |r| {
                let x = L::widen_signed_register(at, r)[i];
                L::dot_word_register(L::zero_sum_register(), x, L::load_word_register(&b, r))
            };
            assert_eq!(sums(&dot), Scalar::dot_i16(Scalar::zero_sums(), words, &b).map(|v| v as f32));
        }
    }
}

/// Checks an instruction set, with permutations of bytes where `BYTES` is set.
struct Check<const BYTES: bool>;

impl<const BYTES: bool> Kernel for Check<BYTES> {
    type Output = ();
    const HAS_DOT_PRODUCTS: bool = true;
    const PERMUTES_BYTES: bool = BYTES;
    fn run<S: Simd>(self) {
        if !S::IS_REFERENCE {
            check::<S>();
        }
        check_conversions::<S>();
        check_bytes::<S>();
        check_registers::<S>();
    }
}

#[test]
fn every_instruction_set_gives_the_bits_of_scalar_code() {
    for isa in Isa::available() {
        dispatch(isa, Check::<false>);
        dispatch(isa, Check::<true>);
    }
}

/// Checks NEON's slower dot products of bytes, which [`dispatch`] does not choose where faster ones exist.
#[cfg(target_arch = "aarch64")]
#[test]
fn every_dot_product_of_neon_gives_the_bits_of_scalar_code() {
    check_bytes::<neon::Neon<neon::Widening>>();
    if std::arch::is_aarch64_feature_detected!("dotprod") {
        check_bytes::<neon::Neon<neon::SignedDots>>();
    }
}
