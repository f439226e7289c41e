//! Checks digests of results: AVX2, AVX-512 and NEON give the same bits on every machine.
//!
//! Change a digest only where the order of sums changes on purpose; the test prints the new one.

#[path = "../src/test_data.rs"]
mod test_data;

use anemoe_kernels::{
    ActivationFunction, AttentionShape, CacheValues, CacheView, Columns, GateFunction, HeadStrides,
    IndexBits, IntBits, Isa, MatMul, Matrix, OwnedMatrix, PackedActivations, Pool, Products, RmsNorm,
    Softmax, Weight, WeightFormat, apply_gate, attention, matmul_batch, rms_norm, round_to_int16, softcap,
};
use test_data::{bytes, noise};

/// Returns the FNV-1a digest of the numbers' bytes.
fn digest(values: &[f32]) -> u64 {
    let bytes = values.iter().flat_map(|v| v.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

/// Multiplies a matrix by 1 token, then by 21. Returns the concatenated results.
fn multiply(isa: Isa, w: &Matrix<'_>) -> Vec<f32> {
    let mut all = Vec::new();
    for tokens in [1, 21] {
        let x = noise(20, tokens * w.cols());
        let mut packed = PackedActivations::default();
        let at = Columns { values: &x, first: 0, token_stride: w.cols(), channel_stride: 1 };
        packed.pack(&Pool::new(1), w.layout(), at, tokens, w.cols());
        let mut y = vec![0f32; tokens * w.rows()];
        let one = MatMul { w: *w, x: &packed, tokens: None, y: &mut y, stride: w.rows(), bias: None };
        matmul_batch(isa, &Pool::new(1), &mut [Some(one)]);
        all.append(&mut y);
    }
    all
}

#[test]
fn matmul_has_these_bits() {
    // Scalar code rounds products before it adds them, and packs activations differently.
    if Isa::best() == Isa::Scalar {
        return;
    }
    let (rows, cols) = (7, 800);
    let n = rows * cols;
    let dense = noise(1, n);
    let halves: Vec<u8> = dense.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect();
    let dense: Vec<u8> = dense.iter().flat_map(|v| v.to_le_bytes()).collect();
    let stored = bytes(2, n);
    let tables = noise(3, rows << 8);
    let (scale, offset) = (noise(4, rows * cols / 32), noise(5, rows * cols / 32));
    // `how` is none for f32 whatever the format.
    let make = |format: WeightFormat, elements: &[u8], sides: [Option<&[f32]>; 2], how: Option<Products>| {
        let elements = elements[..n * usize::from(format.bits()) / 8].to_vec();
        let [values, offsets] = sides.map(|side| side.map(<[f32]>::to_vec));
        let mut matrix = OwnedMatrix::new(Weight { format, elements, values, offsets }, rows, cols).unwrap();
        if let Some(products) = how {
            matrix.prepare(products);
        }
        matrix
    };
    let lut = |bits: IndexBits, tables: &[f32], how| {
        let table = &tables[..rows << bits.bits()];
        make(WeightFormat::Lut { bits, rows_per_table: 1 }, &stored, [Some(table), None], how)
    };
    let mut rounded = tables[..rows << 4].to_vec();
    rounded.chunks_mut(16).for_each(round_to_int16);
    let int = |bits, signed, block_cols: usize, how| {
        let format = WeightFormat::Int { bits, signed, block_rows: 1, block_cols, offsets: true };
        let blocks = n / block_cols;
        make(format, &stored, [Some(&scale[..blocks]), Some(&offset[..blocks])], how)
    };
    let powers: Vec<f32> = bytes(6, n / 32).iter().map(|b| 2f32.powi(i32::from(b % 16) - 12)).collect();
    let mxfp4 = WeightFormat::Mxfp4 { block_cols: 32 };
    use IndexBits::*;
    let fast = Some(Products::Fast);
    let expected = [
        ("f32", make(WeightFormat::F32, &dense, [None, None], None), 0x5087_a996_90ad_67e3),
        ("f16", make(WeightFormat::Fp16, &halves, [None, None], None), 0x9f1e_f3bc_dc36_7672),
        ("lut1", lut(One, &tables, None), 0xa66c_eaae_bc4e_c310),
        ("lut2", lut(Two, &tables, None), 0x4354_873b_4036_2f8c),
        ("lut3", lut(Three, &tables, None), 0x89da_9b1a_c80b_88b2),
        ("lut4", lut(Four, &tables, None), 0xb8b2_ae66_5d73_a6f4),
        ("lut4 int16", lut(Four, &rounded, Some(Products::Exact)), 0x0e2e_c51a_a628_c355),
        ("lut6", lut(Six, &tables, None), 0x7c79_018e_473b_7a9f),
        ("lut8", lut(Eight, &tables, None), 0xcf29_75ab_a9f0_15bc),
        ("int4", int(IntBits::Four, true, 32, None), 0x3b20_3ce3_1971_d75f),
        ("mxfp4", make(mxfp4, &stored, [Some(&powers), None], Some(Products::Exact)), 0x75eb_be8d_227f_4215),
        ("int8", int(IntBits::Eight, true, 32, None), 0xbd02_21a4_357f_bbc0),
        ("uint8", int(IntBits::Eight, false, cols, None), 0x61df_a3e0_f105_5ced),
        ("fast lut1", lut(One, &tables, fast), 0x2f26_cdbf_4fb7_be99),
        ("fast lut2", lut(Two, &tables, fast), 0x9698_1bfa_7910_40b2),
        ("fast lut3", lut(Three, &tables, fast), 0xa115_0460_a402_2f2c),
        ("fast lut4", lut(Four, &tables, fast), 0x5132_fa67_e95f_2853),
        ("fast lut6", lut(Six, &tables, fast), 0x78c0_00de_56b6_bcd8),
        ("fast lut8", lut(Eight, &tables, fast), 0xa9c8_10ea_3965_0f36),
        ("fast int4", int(IntBits::Four, true, cols, fast), 0x0d7d_fa36_5734_1307),
        ("fast int8", int(IntBits::Eight, true, cols, fast), 0xd4d8_c4d8_9d1c_1d2a),
        ("fast uint8", int(IntBits::Eight, false, cols, fast), 0x01cd_e106_b067_f301),
    ];
    let mut wrong = Vec::new();
    for isa in Isa::available().filter(|isa| *isa != Isa::Scalar) {
        for (kind, w, expected) in &expected {
            let found = digest(&multiply(isa, &w.view()));
            if found != *expected {
                wrong.push(format!("{isa:?} {kind}: {found:#018x}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn vector_functions_have_these_bits() {
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
    apply_gate(&x, &noise(7, 1003), 0.7, GateFunction::Product(ActivationFunction::GeluTanh), &mut y);
    check("gelu", &y, 0x5496_965b_80d6_c5ca);
    apply_gate(&x, &noise(7, 1003), 0.7, GateFunction::Product(ActivationFunction::Silu), &mut y);
    check("silu", &y, 0x6701_ed49_fd70_74cc);
    rms_norm(
        &x,
        Some(&noise(8, 1003)),
        RmsNorm { eps: 1e-6, relative_eps: 1e-5, relative_least: 0.0, floor: 1e-3 },
        &mut y,
    );
    check("norm", &y, 0xcb22_0444_da3b_b742);
    y.copy_from_slice(&x);
    softcap(&mut y, 7.0);
    check("softcap", &y, 0x02e0_4f7b_43db_e5ee);
    // One block of slots, and several chunks.
    for (slots, d, expected) in [(45, 88, 0xf32d_4586_baea_ecc9), (2100, 40, 0x5ac3_e228_8a6c_d3a7)] {
        let s = AttentionShape { heads: 6, kv_heads: 2, tokens: 2, head_dim: d, slots };
        let values: Vec<u16> =
            noise(9, 2 * slots * d).into_iter().map(|v| half::f16::from_f32(v).to_bits()).collect();
        let values = CacheValues::F16(&values);
        let kv = CacheView { values, first: 0, head_stride: slots * d, slot_stride: d };
        let at = HeadStrides { first: 0, head: 2 * d, token: d };
        let mut out = vec![0f32; 6 * 2 * d];
        let softmax = Softmax { scale: 0.4, mask: None, sinks: None };
        attention(&Pool::new(1), &s, softmax, (&noise(10, 6 * 2 * d), at), &kv, &kv, (&mut out, at));
        check(&format!("attention over {slots}"), &out, expected);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
