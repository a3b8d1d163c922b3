pub(crate) fn assert_near(actual: &[f32], expected: &[f32], relative: f32) {
    assert_eq!(actual.len(), expected.len());
    for (actual, expected) in actual.iter().zip(expected) {
        assert!((actual - expected).abs() <= relative * expected.abs(), "{actual} is not {expected}");
    }
}
