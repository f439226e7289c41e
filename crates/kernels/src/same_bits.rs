//! Results are the same bits with AVX2, AVX-512 and NEON, on whatever machine: their digests are written down here. Where the
//! order of sums is changed on purpose, so are these.

use crate::test_data::{bytes, noise};
use crate::{AttentionShape, CacheValues, CacheView, Codes, Columns, Gate, HeadStrides, Isa, Matrix, Panel};
use crate::{Pool, Product, RmsNorm, attention, gated, products_on, rms_norm, softcap};

/// FNV-1a of the numbers' bytes.
fn digest(values: &[f32]) -> u64 {
    let bytes = values.iter().flat_map(|v| v.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

/// Products of one matrix, with one token by itself and with several.
fn product(isa: Isa, w: &Matrix<'_>) -> Vec<f32> {
    let mut all = Vec::new();
    for tokens in [1, 11] {
        let x = noise(20, tokens * w.cols());
        let mut panel = Panel::default();
        let at = Columns { values: &x, first: 0, token_stride: w.cols(), channel_stride: 1 };
        panel.fill(w.order(), at, tokens, w.cols(), None);
        let mut y = vec![0f32; tokens * w.rows()];
        let one = Product { w: *w, x: &panel, tokens: None, y: &mut y, stride: w.rows(), bias: None };
        products_on(isa, &Pool::new(1), &mut [Some(one)]);
        all.append(&mut y);
    }
    all
}

#[test]
fn products_have_these_bits() {
    // Which are also those that tokens become integers with.
    if Isa::best() == Isa::Scalar {
        return;
    }
    let (rows, cols) = (7, 800);
    let n = rows * cols;
    let dense = noise(1, n);
    let halves: Vec<u8> = dense.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect();
    let stored = bytes(2, n);
    let tables = noise(3, rows << 8);
    let (scale, offset) = (noise(4, rows * cols / 32), noise(5, rows * cols / 32));
    let codes = [1, 2, 3, 4, 6, 8].map(|bits| Codes::new(&tables[..rows << bits], bits).unwrap());
    let lut = |bits: usize| {
        Matrix::lut(bits, &stored[..n * bits / 8], &tables[..rows << bits], 1, rows, cols).unwrap()
    };
    let int = |bits: usize, signed, block: usize| {
        let blocks = rows * cols / block;
        let (scale, offset) = (&scale[..blocks], &offset[..blocks]);
        Matrix::int(bits, signed, &stored[..n * bits / 8], scale, Some(offset), (1, block), rows, cols)
            .unwrap()
    };
    let expected: [(&str, Matrix<'_>, u64); 22] = [
        ("f32", Matrix::f32(&dense, rows, cols).unwrap(), 0x6d5f_5f82_1df0_1f92),
        ("f16", Matrix::f16(&halves, rows, cols).unwrap(), 0x3417_2118_5dba_6ab8),
        ("lut1", lut(1), 0xf62e_e68c_9618_830d),
        ("lut2", lut(2), 0x1cca_c61f_1573_f02b),
        ("lut3", lut(3), 0x99cd_1f1c_cc3b_71f3),
        ("lut4", lut(4), 0xd8e6_b345_e050_491f),
        ("lut6", lut(6), 0x5357_f9a4_f344_d7b1),
        ("lut8", lut(8), 0x7e1c_cb43_70af_7a74),
        ("int4", int(4, true, 32), 0xac3b_a6cf_e812_b572),
        ("int8", int(8, true, 32), 0x58f8_2a15_4277_2387),
        ("uint8", int(8, false, cols), 0x1c6b_d7b2_4a10_290d),
        ("fast lut1", lut(1).fast(Some(&codes[0])), 0x8da6_c67d_6125_31f4),
        ("fast lut2", lut(2).fast(Some(&codes[1])), 0x8241_c1f4_c226_85c0),
        ("fast lut3", lut(3).fast(Some(&codes[2])), 0x005b_f5f4_e730_52a7),
        ("fast lut4", lut(4).fast(Some(&codes[3])), 0xe86b_66a0_17a5_3241),
        ("fast lut6", lut(6).fast(Some(&codes[4])), 0x1547_e379_b347_8297),
        ("fast lut8", lut(8).fast(Some(&codes[5])), 0xfe94_3fc9_0f70_8bcc),
        ("fast int4", int(4, true, cols).fast(None), 0x1256_d37c_b4f8_856e),
        ("fast int8", int(8, true, cols).fast(None), 0xd344_97ca_8751_eaa1),
        ("fast uint8", int(8, false, cols).fast(None), 0x269c_c5c2_026e_8a3f),
        ("fast int4 by 32", int(4, true, 32).fast(None), 0x54bb_63ef_73b0_1d9f),
        ("fast uint8 by 32", int(8, false, 32).fast(None), 0xf764_cf30_f31f_76b3),
    ];
    let mut wrong = Vec::new();
    for isa in Isa::available().filter(|isa| *isa != Isa::Scalar) {
        for (kind, w, expected) in &expected {
            let found = digest(&product(isa, w));
            if found != *expected {
                wrong.push(format!("{isa:?} {kind}: {found:#018x}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn functions_of_vectors_have_these_bits() {
    if Isa::best() == Isa::Scalar {
        return;
    }
    let x: Vec<f32> = noise(6, 1003).into_iter().map(|v| v * 20.0).collect();
    let mut wrong = Vec::new();
    let mut check = |what: &str, values: &[f32], expected: u64| {
        let found = digest(values);
        if found != expected {
            wrong.push(format!("{what}: {found:#018x}"));
        }
    };
    let mut y = vec![0f32; 1003];
    gated(&x, &noise(7, 1003), 0.7, Gate::GeluTanh, &mut y);
    check("gelu", &y, 0x5496_965b_80d6_c5ca);
    gated(&x, &noise(7, 1003), 0.7, Gate::Silu, &mut y);
    check("silu", &y, 0x6701_ed49_fd70_74cc);
    rms_norm(&x, Some(&noise(8, 1003)), RmsNorm { eps: 1e-6, relative_eps: 1e-5, floor: 1e-3 }, &mut y);
    check("norm", &y, 0xcb22_0444_da3b_b742);
    y.copy_from_slice(&x);
    softcap(&mut y, 7.0);
    check("softcap", &y, 0x02e0_4f7b_43db_e5ee);
    // Of one block of slots, and of several chunks.
    for (slots, d, expected) in [(45, 88, 0xf32d_4586_baea_ecc9), (2100, 40, 0x5ac3_e228_8a6c_d3a7)] {
        let s = AttentionShape { heads: 6, kv_heads: 2, tokens: 2, head_dim: d, slots };
        let values: Vec<u16> =
            noise(9, 2 * slots * d).into_iter().map(|v| half::f16::from_f32(v).to_bits()).collect();
        let values = CacheValues::F16(&values);
        let kv = CacheView { values, first: 0, head_stride: slots * d, slot_stride: d };
        let at = HeadStrides { first: 0, head: 2 * d, token: d };
        let mut out = vec![0f32; 6 * 2 * d];
        attention(&Pool::new(1), &s, 0.4, (&noise(10, 6 * 2 * d), at), &kv, &kv, None, (&mut out, at));
        check(&format!("attention over {slots}"), &out, expected);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
