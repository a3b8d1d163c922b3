//! Convolutions by their definition, one product after the other on the host.

use crate::{Convolution, Wanted, convolution::strides};

/// The tensor that is wanted, from the other two. All lie with the channels last.
pub(crate) fn direct(convolution: &Convolution, [a, b]: [&[f32]; 2]) -> Vec<f32> {
    let [.., output] = convolution.shapes();
    let mut sums = vec![0.0; output.iter().product()];
    each_product(convolution, |x, w, y| match convolution.wanted {
        Wanted::Output => sums[y] += a[x] * b[w],
        Wanted::InputGradient => sums[x] += a[w] * b[y],
        Wanted::WeightGradient => sums[w] += a[x] * b[y],
    });
    sums
}

/// Where the elements of `x`, `w` and `y` lie that belong to one product.
fn each_product(convolution: &Convolution, mut product: impl FnMut(usize, usize, usize)) {
    let Convolution { x, w, .. } = convolution;
    let y = convolution.y();
    let strides = [x, w, &y].map(|shape| strides(shape));
    let outputs_of_group = w[0] * w[1] / x[1];
    for image in 0..x[0] {
        for output in 0..w[0] {
            for channel in 0..w[1] {
                let of_x = output / outputs_of_group * w[1] + channel;
                let starts = [
                    image * strides[0][0] + of_x,
                    output * strides[1][0] + channel,
                    image * strides[2][0] + output,
                ];
                each_pixel(convolution, &y, &strides, 0, starts, &mut product);
            }
        }
    }
}

/// The same from the spatial dimension `dim` on.
fn each_pixel(
    convolution: &Convolution,
    y: &[usize],
    strides: &[Vec<usize>; 3],
    dim: usize,
    [x_at, w_at, y_at]: [usize; 3],
    product: &mut impl FnMut(usize, usize, usize),
) {
    if dim == convolution.stride.len() {
        return product(x_at, w_at, y_at);
    }
    let axis = dim + 2;
    for pixel in 0..y[axis] {
        for tap in 0..convolution.w[axis] {
            let padded = pixel * convolution.stride[dim] + tap * convolution.dilation[dim];
            let read = padded.checked_sub(convolution.padding[dim].0);
            let Some(read) = read.filter(|&read| read < convolution.x[axis]) else {
                continue;
            };
            let next = [
                x_at + read * strides[0][axis],
                w_at + tap * strides[1][axis],
                y_at + pixel * strides[2][axis],
            ];
            each_pixel(convolution, y, strides, dim + 1, next, product);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Element;

    /// By hand: of a line of two channels.
    #[test]
    fn a_line_is_convolved() {
        let mut line = Convolution {
            padding: vec![(1, 0)],
            stride: vec![2],
            ..Convolution::new(Element::BF16, &[1, 2, 4], &[1, 2, 2])
        };
        // Pixels of two channels each, as are the taps.
        let x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
        let w = [1.0, 10.0, 100.0, 1000.0];
        let y = [2100.0, 43.0 + 6500.0];
        assert_eq!(direct(&line, [&x, &w]), y);
        line.wanted = Wanted::InputGradient;
        let dx = [100.0, 1000.0, 2.0, 20.0, 200.0, 2000.0, 0.0, 0.0];
        assert_eq!(direct(&line, [&w, &[1.0, 2.0]]), dx);
        line.wanted = Wanted::WeightGradient;
        assert_eq!(direct(&line, [&x, &[1.0, 10.0]]), [30.0, 40.0, 51.0, 62.0]);
    }

    /// A convolution is linear in both: each gradient is the adjoint of the output.
    #[test]
    fn gradients_are_adjoints() {
        let output = Convolution {
            stride: vec![2, 1, 1],
            padding: vec![(1, 1), (0, 2), (1, 0)],
            dilation: vec![1, 2, 1],
            ..Convolution::new(Element::BF16, &[2, 6, 5, 4, 3], &[4, 3, 2, 2, 2])
        };
        let numbers = |shape: &[usize], step: usize| -> Vec<f32> {
            let count = shape.iter().product::<usize>();
            (0..count).map(|i| (i * step % 7) as f32 - 3.0).collect()
        };
        let dot = |a: &[f32], b: &[f32]| -> f32 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
        let [x, w, dy] = [(&output.x, 3), (&output.w, 5), (&output.y(), 2)]
            .map(|(shape, step)| numbers(shape, step));
        let expected = dot(&direct(&output, [&x, &w]), &dy);
        assert_ne!(expected, 0.0);
        let of = |wanted| Convolution {
            wanted,
            ..output.clone()
        };
        let dx = direct(&of(Wanted::InputGradient), [&w, &dy]);
        assert_eq!(dot(&dx, &x), expected);
        let dw = direct(&of(Wanted::WeightGradient), [&x, &dy]);
        assert_eq!(dot(&dw, &w), expected);
    }
}
