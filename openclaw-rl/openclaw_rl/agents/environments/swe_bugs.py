"""Functions of two lines and their bugs, for the SWE miniature.

A line is: name | argument | right expression | wrong expressions, separated by `;` | kind of the tests' arguments. `K`
in a name and an expression is a number, which makes many functions of one line.
"""

TRAIN = """
double|x|x * 2|x + 2;x * 3|int
triple|x|x * 3|x * 2;x + 3|int
square|x|x * x|x + x;x * 2|int
cube|x|x * x * x|x * x;x * 3|int
negate|x|-x|x;x - 1|int
is_even|x|x % 2 == 0|x % 2 == 1;x % 3 == 0|int
is_positive|x|x > 0|x < 0;x >= 0|int
is_zero|x|x == 0|x != 0;x > 0|int
absolute|x|abs(x)|-x;x|int
hundredth|x|x / 100|x * 100;x / 10|int
next_number|x|x + 1|x - 1;x + 2|int
last_digit|x|abs(x) % 10|abs(x) % 2;abs(x) // 10|int
add_K|x|x + K|x - K;x * K|int
times_K|x|x * K|x + K;x - K|int
is_K|x|x == K|x != K;x > K|int
above_K|x|x > K|x < K;x >= K|int
at_most_K|x|x <= K|x < K;x >= K|int
rest_of_K|x|x % K|x // K;x * K|int
cap_at_K|x|min(x, K)|max(x, K);min(x, 0)|int
power_K|x|x ** K|x * K;x + K|small
first_letter|s|s[0]|s[-1];s[1:]|word
upper_case|s|s.upper()|s.lower();s.title()|word
count_letters|s|len(s)|len(s) + 1;len(s) - 1|word
reverse_text|s|s[::-1]|s[1:];s[:-1]|word
without_last|s|s[:-1]|s[1:];s[-1]|word
is_empty|s|len(s) == 0|len(s) > 0;len(s) == 1|word_or_empty
shout|s|s + '!'|s + '?';'!' + s|word
repeat_K|s|s * K|s + s;s[0] * K|word
first_K_letters|s|s[:K]|s[K:];s[-K:]|word
longer_than_K|s|len(s) > K|len(s) < K;len(s) == K|word
count_a|s|s.count('a')|s.count('b');len(s)|word
starts_with_a|s|s.startswith('a')|s.endswith('a');'a' in s|word
total|items|sum(items)|max(items);len(items)|numbers
largest|items|max(items)|min(items);items[0]|numbers
count_items|items|len(items)|sum(items);len(items) - 1|numbers
first_item|items|items[0]|items[-1];items[1]|numbers
reverse_items|items|items[::-1]|items[1:];sorted(items)|numbers
sort_items|items|sorted(items)|items;items[::-1]|numbers
add_all_K|items|[n + K for n in items]|[n - K for n in items];[n * K for n in items]|numbers
above_all_K|items|[n for n in items if n > K]|[n for n in items if n < K];items[:K]|numbers
has_K|items|K in items|K not in items;K == items[0]|numbers
drop_K|items|items[K:]|items[:-K];items[:K]|numbers
spread|items|max(items) - min(items)|max(items) + min(items);max(items)|numbers
unique_count|items|len(set(items))|len(items);set(items)|numbers
five_times|x|x * 5|x + 5;x * 2|int
plus_ten|x|x + 10|x - 10;x * 10|int
less_ten|x|x - 10|x + 10;x / 10|int
is_not_zero|x|x != 0|x == 0;x < 0|int
is_not_one|x|x != 1|x == 1;x > 1|int
not_negative|x|x >= 0|x < 0;x > 0|int
not_positive|x|x <= 0|x > 0;x < 0|int
is_large|x|x > 10|x < 10;x == 10|int
at_least_zero|x|max(x, 0)|min(x, 0);abs(x)|int
at_most_zero|x|min(x, 0)|max(x, 0);-x|int
ends_in_zero|x|x % 10 == 0|x % 10 == 1;x == 10|int
second_letter|s|s[1]|s[0];s[-1]|word
two_letters|s|s[:2]|s[2:];s[-2:]|word
skip_two|s|s[2:]|s[:2];s[:-2]|word
skip_K|s|s[K:]|s[:K];s[-K:]|word
cut_two|s|s[:-2]|s[2:];s[-2:]|word
title_case|s|s.title()|s.upper();s.lower()|word
swap_case|s|s.swapcase()|s.lower();s.title()|word
plural|s|s + 's'|'s' + s;s + 'es'|word
dash|s|s + '-'|'-' + s;s + '.'|word
end_line|s|s + '.'|'.' + s;s + ','|word
twice|s|s + s|s;s * 3|word
is_short|s|len(s) < 4|len(s) > 4;len(s) == 4|word
is_long|s|len(s) > 4|len(s) < 4;len(s) == 4|word
has_a|s|'a' in s|'a' not in s;s == 'a'|word
lacks_a|s|'a' not in s|'a' in s;s != 'a'|word
lacks_e|s|'e' not in s|'e' in s;s != 'e'|word
ends_with_a|s|s.endswith('a')|s.startswith('a');'a' in s|word
starts_with_b|s|s.startswith('b')|s.endswith('b');'b' in s|word
second_item|items|items[1]|items[0];items[-1]|numbers
first_two|items|items[:2]|items[2:];items[-2:]|numbers
cut_two_items|items|items[:-2]|items[2:];items[-2:]|numbers
half_all|items|[n / 2 for n in items]|[n * 2 for n in items];[n - 2 for n in items]|numbers
less_all_K|items|[n - K for n in items]|[n + K for n in items];[n * K for n in items]|numbers
negate_all|items|[-n for n in items]|[n for n in items];[n - 1 for n in items]|numbers
even_items|items|[n for n in items if n % 2 == 0]|[n for n in items if n % 2 == 1];items[::2]|numbers
below_all_K|items|[n for n in items if n < K]|[n for n in items if n > K];items[-K:]|numbers
has_two|items|2 in items|2 not in items;items[0] == 2|numbers
lacks_one|items|1 not in items|1 in items;1 != items[0]|numbers
lacks_zero|items|0 not in items|0 in items;0 != items[0]|numbers
count_K|items|items.count(K)|items[0];len(items)|numbers
mean|items|sum(items) / len(items)|sum(items);max(items)|numbers
hundred_times|x|x * 100|x + 100;x / 100|int
twenty_times|x|x * 20|x + 20;x * 2|int
eleven_times|x|x * 11|x + 11;x - 11|int
plus_twelve|x|x + 12|x - 12;x * 12|int
plus_one_hundred|x|x + 100|x - 100;x * 100|int
twice_minus_K|x|x * 2 - K|x * 2 + K;x * K|int
square_plus_K|x|x * x + K|x * x - K;x + K|int
square_below_K|x|x * x < K|x * x > K;x < K|int
square_at_least_K|x|x * x >= K|x * x < K;x >= K|int
twice_at_least_K|x|x * 2 >= K|x * 2 < K;x * 2 > K|int
twice_at_most_K|x|x * 2 <= K|x * 2 > K;x * 2 < K|int
cap_at_ten|x|min(x, 10)|max(x, 10);min(x, 1)|int
rest_of_ten|x|x % 10|x // 10;x * 10|int
length_at_least_K|s|len(s) >= K|len(s) < K;len(s) == K|word
length_at_most_K|s|len(s) <= K|len(s) > K;len(s) == K|word
length_is_K|s|len(s) == K|len(s) != K;len(s) > K|word
length_is_not_K|s|len(s) != K|len(s) == K;len(s) < K|word
length_minus_K|s|len(s) - K|len(s) + K;len(s) * K|word
length_times_K|s|len(s) * K|len(s) + K;len(s)|word
lacks_b|s|'b' not in s|'b' in s;s == 'b'|word
lacks_o|s|'o' not in s|'o' in s;s != 'o'|word
has_e|s|'e' in s|'e' not in s;s == 'e'|word
has_o|s|'o' in s|'o' not in s;s == 'o'|word
ends_with_o|s|s.endswith('o')|s.startswith('o');'o' in s|word
ends_with_t|s|s.endswith('t')|s.startswith('t');'t' in s|word
starts_with_z|s|s.startswith('z')|s.endswith('z');'z' in s|word
ask_twice|s|s + '??'|s + '!!';'??' + s|word
shout_twice|s|s + '!!'|s + '??';'!!' + s|word
ask_before|s|'?' + s|s + '?';'!' + s|word
shout_before|s|'!' + s|s + '!';'?' + s|word
comma|s|s + ','|s + '.';',' + s|word
colon|s|s + ':'|s + '-';':' + s|word
first_four_letters|s|s[:4]|s[4:];s[-4:]|word
without_first_four|s|s[4:]|s[:-4];s[:4]|word
without_ends|s|s[1:-1]|s[1:2];s[:-2]|word
next_to_last_letter|s|s[-2]|s[1];s[0]|word
lower_twice|s|s.lower() * 2|s.upper() * 2;s * 2|word
upper_twice|s|s.upper() * 2|s.lower() * 2;s * 2|word
total_plus_K|items|sum(items) + K|sum(items) - K;sum(items)|numbers
total_minus_K|items|sum(items) - K|sum(items) + K;sum(items)|numbers
total_below_K|items|sum(items) < K|sum(items) > K;sum(items) == K|numbers
total_above_K|items|sum(items) > K|sum(items) < K;sum(items) == K|numbers
total_at_least_K|items|sum(items) >= K|sum(items) < K;sum(items) > K|numbers
total_at_most_K|items|sum(items) <= K|sum(items) > K;sum(items) < K|numbers
total_is_not_K|items|sum(items) != K|sum(items) == K;sum(items) > K|numbers
total_is_negative|items|sum(items) < 0|sum(items) > 0;sum(items) == 0|numbers
total_is_even|items|sum(items) % 2 == 0|sum(items) % 2 == 1;sum(items) == 2|numbers
total_divided_by_K|items|sum(items) / K|sum(items) * K;sum(items) + K|numbers
largest_minus_K|items|max(items) - K|max(items) + K;min(items) - K|numbers
largest_below_K|items|max(items) < K|max(items) > K;min(items) < K|numbers
largest_at_least_K|items|max(items) >= K|max(items) < K;max(items) == K|numbers
first_below_K|items|items[0] < K|items[0] > K;items[0] == K|numbers
first_at_least_K|items|items[0] >= K|items[0] < K;items[0] > K|numbers
first_is_not_K|items|items[0] != K|items[0] == K;items[0] > K|numbers
divide_all_K|items|[n / K for n in items]|[n * K for n in items];[n + K for n in items]|numbers
rest_of_all_K|items|[n % K for n in items]|[n * K for n in items];[n - K for n in items]|numbers
raise_all_to_K|items|[max(n, K) for n in items]|[min(n, K) for n in items];[K for n in items]|numbers
cap_all_at_K|items|[min(n, K) for n in items]|[max(n, K) for n in items];[K for n in items]|numbers
at_least_all_K|items|[n for n in items if n >= K]|[n for n in items if n < K];[n for n in items if n > K]|numbers
not_all_K|items|[n for n in items if n != K]|[n for n in items if n == K];[n for n in items if n > K]|numbers
odd_items|items|[n for n in items if n % 2 == 1]|[n for n in items if n % 2 == 0];items[1::2]|numbers
negative_items|items|[n for n in items if n < 0]|[n for n in items if n > 0];[-n for n in items]|numbers
squares|items|[n * n for n in items]|[n + n for n in items];[n * 2 for n in items]|numbers
times_all_ten|items|[n * 10 for n in items]|[n + 10 for n in items];[n - 10 for n in items]|numbers
add_all_ten|items|[n + 10 for n in items]|[n - 10 for n in items];[n * 10 for n in items]|numbers
"""

EVAL = """
twelve_times|x|x * 12|x + 12;x * 2|int
is_odd|x|x % 2 == 1|x % 2 == 0;x % 3 == 1|int
is_negative|x|x < 0|x > 0;x <= 0|int
previous_number|x|x - 1|x + 1;x - 2|int
ten_times|x|x * 10|x + 10;x / 10|int
minus_K|x|x - K|x + K;x * K|int
below_K|x|x < K|x > K;x <= K|int
at_least_K|x|x >= K|x > K;x <= K|int
divide_by_K|x|x / K|x * K;x + K|int
not_K|x|x != K|x == K;x < K|int
raise_to_K|x|max(x, K)|min(x, K);max(x, 0)|int
whole_part_K|x|x // K|x % K;x * K|int
last_letter|s|s[-1]|s[0];s[1:]|word
lower_case|s|s.lower()|s.upper();s.title()|word
without_first|s|s[1:]|s[:-1];s[0]|word
ask|s|s + '?'|s + '!';'?' + s|word
shorter_than_K|s|len(s) < K|len(s) > K;len(s) == K|word
last_K_letters|s|s[-K:]|s[:K];s[K:]|word
ends_with_e|s|s.endswith('e')|s.startswith('e');'e' in s|word
smallest|items|min(items)|max(items);items[0]|numbers
last_item|items|items[-1]|items[0];items[1]|numbers
times_all_K|items|[n * K for n in items]|[n + K for n in items];[n - K for n in items]|numbers
lacks_K|items|K not in items|K in items;K == items[0]|numbers
drop_last_three|items|items[:-3]|items[3:];items[:3]|numbers
"""
