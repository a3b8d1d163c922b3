//! Runs random programs, and compares what they see.

use super::{
    machine::Seen,
    precision::Precision,
    program::{Form, Program, programs},
};
use crate::suite::random_cases;
use proptest::{sample::select, test_runner::TestCaseError};

/// Checks `cases` programs of that form, the same ones each time.
pub(super) fn check(
    cases: u32,
    form: Form,
    test: impl Fn(Precision, &Program) -> Result<(), TestCaseError>,
) {
    let strategy = (select(form.precisions), programs(form));
    random_cases::check(cases, strategy, |(precision, program)| {
        test(*precision, program)
    });
}

/// That two runs of a program saw the same numbers. The sign of zeros may differ: the sum of -0 alone is 0, or is left as it is.
pub(super) fn same(expected: &Seen, found: &Seen) -> Result<(), TestCaseError> {
    let fail = |text: String| Err(TestCaseError::fail(text));
    let mut forms = expected.forms.iter().zip(&found.forms);
    if let Some((expected, found)) = forms.find(|(expected, found)| expected != found) {
        return fail(format!("{found:?} for {expected:?}"));
    }
    for ((what, expected), (_, found)) in expected.data.iter().zip(&found.data) {
        let [form, other] = [expected, found].map(|data| (data.dtype(), data.shape().clone()));
        if form != other {
            return fail(format!("{what}: {other:?} for {form:?}"));
        }
        let pairs = expected.iter::<f64>().zip(found.iter::<f64>());
        let differ = |(_, (a, b)): &(usize, (f64, f64))| a != b && !(a.is_nan() && b.is_nan());
        if let Some((place, (expected, found))) = pairs.enumerate().find(differ) {
            return fail(format!(
                "{what} at {place}: {found} for {expected}, {form:?}"
            ));
        }
    }
    let counts = |seen: &Seen| (seen.forms.len(), seen.data.len());
    match counts(expected) == counts(found) {
        true => Ok(()),
        false => fail("one saw more than the other".into()),
    }
}
