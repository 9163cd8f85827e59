//! The date, as chat templates may ask for it.

/// A moment on a wall clock. Whoever renders a template passes it in: this room has no clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct LocalTime {
    pub year: i32,
    /// 1 to 12.
    pub month: u32,
    /// 1 to 31.
    pub day: u32,
    pub hour: u32,
    pub minute: u32,
    pub second: u32,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

impl LocalTime {
    /// From seconds since 1970-01-01 00:00 on the wall clock in question (so, with the zone's offset added).
    pub fn from_unix(seconds: i64) -> Self {
        let (days, rest) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400) as u32);
        // Eras of 400 years, counted from a first of March, so that the leap day is a year's last.
        let days = days + 719_468;
        let (era, day_of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
        let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_of_year + 2) / 153;
        let day = (day_of_year - (153 * month_from_march + 2) / 5 + 1) as u32;
        let month = (if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 }) as u32;
        let year = (year_of_era + era * 400 + i64::from(month <= 2)) as i32;
        Self { year, month, day, hour: rest / 3_600, minute: rest / 60 % 60, second: rest % 60 }
    }

    /// Python's `strftime` in the C locale; codes it does not know stay as they are.
    pub fn format(&self, format: &str) -> String {
        let mut out = String::with_capacity(format.len() + 16);
        let mut letters = format.chars().peekable();
        while let Some(letter) = letters.next() {
            if letter != '%' {
                out.push(letter);
                continue;
            }
            let unpadded = letters.next_if_eq(&'-').is_some();
            match letters.next() {
                Some(code) => self.push_code(code, unpadded, &mut out),
                None => out.push('%'),
            }
        }
        out
    }

    fn push_code(&self, code: char, unpadded: bool, out: &mut String) {
        let mut number = |value: u32, width: usize| {
            let width = if unpadded { 0 } else { width };
            out.push_str(&format!("{value:0width$}"));
        };
        let hour12 = (self.hour + 11) % 12 + 1;
        match code {
            'd' => number(self.day, 2),
            'm' => number(self.month, 2),
            'y' => number(self.year.rem_euclid(100) as u32, 2),
            'H' => number(self.hour, 2),
            'I' => number(hour12, 2),
            'M' => number(self.minute, 2),
            'S' => number(self.second, 2),
            'j' => number(self.day_of_year(), 3),
            'w' => number((self.weekday() as u32 + 1) % 7, 1),
            'u' => number(self.weekday() as u32 + 1, 1),
            'f' => number(0, 6),
            'e' => out.push_str(&format!("{:2}", self.day)),
            'Y' => out.push_str(&self.year.to_string()),
            'B' => out.push_str(self.month_name()),
            'b' | 'h' => out.push_str(&self.month_name()[..3]),
            'A' => out.push_str(DAYS[self.weekday()]),
            'a' => out.push_str(&DAYS[self.weekday()][..3]),
            'p' => out.push_str(if self.hour < 12 { "AM" } else { "PM" }),
            'F' => out.push_str(&self.format("%Y-%m-%d")),
            'T' | 'X' => out.push_str(&self.format("%H:%M:%S")),
            'R' => out.push_str(&self.format("%H:%M")),
            'D' | 'x' => out.push_str(&self.format("%m/%d/%y")),
            'c' => out.push_str(&self.format("%a %b %e %H:%M:%S %Y")),
            'z' | 'Z' => {} // a naive time, as in the reference
            'n' => out.push('\n'),
            't' => out.push('\t'),
            '%' => out.push('%'),
            other => out.extend(['%', other]),
        }
    }

    fn month_name(&self) -> &'static str {
        MONTHS[(self.month.clamp(1, 12) - 1) as usize]
    }

    fn day_of_year(&self) -> u32 {
        let leap = self.year % 4 == 0 && (self.year % 100 != 0 || self.year % 400 == 0);
        let lengths = [31, 28 + u32::from(leap), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        lengths[..(self.month.clamp(1, 12) - 1) as usize].iter().sum::<u32>() + self.day
    }

    /// 0 is Monday.
    fn weekday(&self) -> usize {
        let before = i64::from(self.year) - 1;
        let days = before * 365 + before.div_euclid(4) - before.div_euclid(100)
            + before.div_euclid(400)
            + i64::from(self.day_of_year())
            - 1;
        days.rem_euclid(7) as usize // 0001-01-01 was a Monday
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_as_python_does() {
        let time = LocalTime { year: 2025, month: 3, day: 4, hour: 5, minute: 6, second: 7 };
        assert_eq!(
            time.format("%Y-%m-%d %d %b %Y %H:%M:%S %A %B %j"),
            "2025-03-04 04 Mar 2025 05:06:07 Tuesday March 063"
        );
        assert_eq!(time.format("%-d/%-m %e %I%p %% %q %"), "4/3  4 05AM % %q %");
    }

    #[test]
    fn counts_from_1970() {
        for (seconds, want) in [
            (0, "1970-01-01 00:00:00 Thursday 001"),
            (951_782_400, "2000-02-29 00:00:00 Tuesday 060"),
            (1_735_689_599, "2024-12-31 23:59:59 Tuesday 366"),
            (-1, "1969-12-31 23:59:59 Wednesday 365"),
            (4_107_542_400, "2100-03-01 00:00:00 Monday 060"),
        ] {
            assert_eq!(LocalTime::from_unix(seconds).format("%F %T %A %j"), want);
        }
    }
}
